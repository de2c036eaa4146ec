"""Trains word vectors on the text that every Python brings along.

`python -m optax_sparse_adam.demo` learns word2vec vectors from the source files of the
standard library, with `sparse_adam` on row-sparse gradients, and takes the first steps
with `optax.adam` on dense gradients as well, to compare time and loss.

Its text and its model are here for studies: `read_corpus`, `SkipGrams`, `init_params`,
`Trainer` and `mean_loss`; see `notebooks/optimizers.ipynb`.
"""

from ._corpus import Batch as Batch
from ._corpus import SkipGrams as SkipGrams
from ._corpus import read_corpus as read_corpus
from ._program import main as main
from ._word2vec import Trainer as Trainer
from ._word2vec import init_params as init_params
from ._word2vec import mean_loss as mean_loss
