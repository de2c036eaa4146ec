"""Trains word vectors on the text that every Python brings along.

`python -m optax_sparse_adam.demo` learns word2vec vectors from the source files of the
standard library, with `sparse_adam` on row-sparse gradients, and takes the first steps
with `optax.adam` on dense gradients as well, to compare time and loss.
"""

from ._program import main as main
