"""`row_sparse`: the steps of a Keras model, on looked-up rows."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras

from .._gradients.evaluate import evaluate
from .._gradients.value_and_grad import value_and_grad
from ._optimizer import Optimizer

# What reads whole tables, what replaces them, and what replaces the optimiser. By
# functions of `keras.saving`, pickle and copy, `save_own_variables` of the model comes
# before those of its layers; for a file of the old kind, `get_config` does.
_WHOLE = (
    *("compile", "save", "export", "quantize", "get_config"),
    *(f"{x}_weights" for x in ("save", "get", "load", "set")),
    *("save_own_variables", "load_own_variables", "get_state_tree", "set_state_tree"),
)


def row_sparse(model: Any, sparse: Any = None) -> Any:
    """Makes a Keras model train on row-sparse gradients; returns the model.

    `fit` and `train_on_batch` of any model, functional, sequential or subclassed,
    differentiate with respect to the rows that the batch looks up. Its class, its
    layers and what it computes stay as they are. It may be called before `compile` or
    after; `compile` needs an `Optimizer` of this module. A gradient is dense where it
    must be: that of a table with a regulariser, or that is also the output layer.

    Args:
      model: The model.
      sparse: Which gradients must be row-sparse, as `sparse=` of
        `optax_sparse_adam.value_and_grad`: a function of a variable, such as `lambda v:
        "user" in v.path`. By default all that can be.

    Returns:
      The same model.

    Raises:
      TypeError: If `model` is no Keras model, or `sparse` is for a `train_step` of its
        own; by `fit`, for another optimiser.
      ValueError: By `fit`, for `sparse`.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"row_sparse needs a Keras model, got {type(model).__name__}.")
    has_step = type(model).train_step is not keras.Model.train_step
    if has_step and sparse is not None:
        raise TypeError(
            f"{type(model).__name__} has a train_step of its own: pass `sparse` to "
            "osa.value_and_grad there, and not to row_sparse."
        )
    if keras.config.is_nnx_enabled():
        raise TypeError(
            "row_sparse takes models of Keras without NNX: unset KERAS_NNX_ENABLED. "
            "For modules of Flax there is optax_sparse_adam.flax_nnx."
        )

    def make_train_function(force: bool = False) -> None:
        _check_optimizer(model)
        if not has_step:
            # A new one: JAX keeps what it has traced of the old, of another optimiser.
            model.train_step = functools.partial(_train_step, model, sparse)
        type(model).make_train_function(model, force)

    def make_reading(kind: str, force: bool = False) -> None:
        name = f"{kind}_function"
        if not isinstance(getattr(model, "optimizer", None), Optimizer):
            getattr(type(model), f"make_{name}")(model, force)
            return
        if not model.optimizer._trains(model):
            flush(model)  # and then Keras reads what it trains no more
        if getattr(model, name) is None or force:
            setattr(model, name, _reading(model, kind))

    def after_flush(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            flush(model)
            result = method(model, *args, **kwargs)
            _prepare(model)  # for what `compile` was given
            return result

        return called

    model.make_train_function = make_train_function
    model.make_test_function = functools.partial(make_reading, "test")
    model.make_predict_function = functools.partial(make_reading, "predict")
    for name in _WHOLE:
        setattr(model, name, after_flush(getattr(type(model), name)))
    model.train_function = model.test_function = model.predict_function = None
    _prepare(model)
    return model


def flush(model: Any) -> None:
    """Brings all rows of a Keras model up to date that `exact_adam` trains.

    `fit` does so when it ends, and saving before it begins; `evaluate` and `predict` do
    not need it. It costs what the tables cost. Under another optimiser nothing happens.

    Args:
      model: A model that `row_sparse` has been called for.
    """
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, Optimizer):
        model.jax_state_sync()
        optimizer._flush()


def _prepare(model: Any) -> None:
    """Lets the optimiser step, whose model calls `flush` before it is read."""
    if isinstance(getattr(model, "optimizer", None), Optimizer):
        model.optimizer._is_prepared = True


def _check_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "Optimizer takes no scaled loss, which Keras adds for mixed_float16. Take "
            "mixed_bfloat16, or compile(auto_scale_loss=False)."
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "A model that row_sparse was called for is compiled with an "
            "optax_sparse_adam.keras.Optimizer, got "
            f"{type(optimizer).__name__}: pass Optimizer(osa.exact_adam, 1e-3)."
        )
    optimizer._check_variables(model)
    _prepare(model)


def _train_step(model: Any, sparse: Any, state: Any, data: Any) -> Any:
    """Keras' `train_step`, with `osa.value_and_grad`."""
    trainable, untrained, slots, metrics = state
    optimizer, variables = model.optimizer, model.trainable_variables
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def loss(trainable: list[Any]) -> Any:
        return model.compute_loss_and_updates(
            *(trainable, untrained, metrics, x, y, weight),
            training=True,
            optimizer_variables=slots,
        )

    mask = [bool(sparse(v)) for v in variables] if callable(sparse) else sparse
    read = optimizer.state_of(slots) if optimizer._is_exact else None
    try:
        result = value_and_grad(loss, has_aux=True, sparse=mask, read=read)(trainable)
    except Exception as error:
        error.add_note(f"Trainable variables: {[v.path for v in variables]}")
        raise
    (_, (value, predicted, untrained, metrics)), grads = result
    trainable, slots = optimizer._stepped(slots, grads, trainable)
    # Not public: what `compile` was given as loss and metrics has no other way in.
    logs, metrics = model._update_metrics_variables(
        metrics, value, x, y, predicted, weight
    )
    return logs, (trainable, untrained, slots, metrics)


def _read_step(
    model: Any, kind: str, trainable: Any, untrained: Any, slots: Any, data: Any
) -> Any:
    """Keras' `test_step` or `predict_step`, of looked-up rows as they are now."""

    def at_rows(trainable: Any) -> Any:
        step = getattr(model, f"{kind}_step")
        outputs, new = step((trainable, *untrained), data)
        return outputs, new[1:] if kind == "test" else [new]

    read = model.optimizer.state_of(slots) if slots else None
    return evaluate(at_rows, read=read)(trainable)


def _reading(model: Any, kind: str) -> Callable[[Any, Iterator[Any]], Any]:
    """`model.test_function` or `predict_function`.

    The optimiser's state is read from its variables: Keras passes it to the training
    step only. That of an optimiser that is not built yet has nothing to say.
    """
    optimizer, step = model.optimizer, functools.partial(_read_step, model, kind)
    if model.jit_compile and not model.run_eagerly:
        step = cast(Any, jax.jit(step, donate_argnums=1))

    def function(state: Any, iterator: Iterator[Any]) -> Any:
        trainable, *untrained = state
        is_known = optimizer.built and optimizer._trains(model)
        variables = optimizer.variables if is_known else []
        slots, outputs = [v.value for v in variables], []
        for data in itertools.islice(iterator, model.steps_per_execution):
            output, untrained = step(trainable, untrained, slots, data)
            outputs.append(output)
        if not outputs:
            raise StopIteration
        if kind == "predict" and len(outputs) > 1:
            outputs = [jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)]
        return outputs[-1], (trainable, *untrained)

    return function
