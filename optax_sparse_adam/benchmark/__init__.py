"""Measures a training step here: ours, torch's and the dense one of optax, in turns.

`python -m optax_sparse_adam.benchmark` times the optimisers of this package,
`torch.optim.SparseAdam` where torch is installed, and `optax.adam` on dense gradients,
side by side in one process, on a CPU or a GPU.
"""

from ._program import main as main
