"""Keras 3 on JAX: row-sparse gradients and optax's optimisers in `fit`.

Two things change in a Keras program: `row_sparse(model)` makes `fit` differentiate with
respect to the rows that a batch looks up, and `Optimizer` in `compile` is an optimiser
of this package, or one of optax around it:

>>> import keras
>>> import numpy as np
>>> import optax_sparse_adam as osa
>>> from optax_sparse_adam.keras import Optimizer, row_sparse
>>> layers = [keras.layers.Embedding(1000, 4), keras.layers.Dense(1)]
>>> model = row_sparse(keras.Sequential(layers))
>>> model.compile(optimizer=Optimizer(osa.sparse_adam, 1e-3), loss="mse")
>>> ids, labels = np.array([[3], [7]]), np.ones((2, 1, 1))
>>> history = model.fit(ids, labels, epochs=2, verbose=0)
>>> len(history.history["loss"])
2

The model stays what it is, of its own class: a file that it is saved to is read by any
Keras. Call `row_sparse` again for what `load_model` or `clone_model` returns. Without
it, `Optimizer` refuses the dense gradients that Keras makes.

Under `exact_adam`, `evaluate`, `predict` and their forms for one batch read rows as
they are now, at the price of the batch. What reads or writes whole tables brings all
rows up to date first: saving, `get_weights`, and the end of `fit`. `flush(model)` does
it at other times, as before `model(x)`, `layer.set_weights` and `variable.assign`
between calls of `train_on_batch`.
"""

import keras as _keras

if _keras.backend.backend() != "jax":
    raise ImportError(
        "optax_sparse_adam.keras needs Keras on JAX, and its backend here is "
        f"{_keras.backend.backend()}: set the environment variable KERAS_BACKEND=jax "
        "before keras is imported."
    )

from ._optimizer import Optimizer as Optimizer
from ._row_sparse import flush as flush
from ._row_sparse import row_sparse as row_sparse
