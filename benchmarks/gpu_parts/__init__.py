"""What `gpu.py` measures: each module has a function of a `Run` for each part.

This file, `table.py` and `gpu.py` itself import no JAX.
"""

XLA, KERNEL, TORCH, DENSE = "XLA", "kernel", "torch SparseAdam", "optax.adam, dense"
FORMAT = "optax_sparse_adam benchmarks/gpu.py 1"
