"""An optional kernel for CPUs: sums and Adam in one pass over the touched rows.

`python -m optax_sparse_adam.native` compiles it with the C++ compiler of the machine,
once for each version of jaxlib, into the user's cache (`XDG_CACHE_HOME`, else
`~/.cache`). From then on `coalesce`, `sparse_adam` and everything that lifts rows use
it by themselves on CPUs, in processes with one CPU device, for tables of float32 with
one sparse axis and `int32` ids; everything else, and every machine without it, takes
the path in plain JAX. Sums are the same bit for bit. Adam rounds each operation once,
where XLA contracts multiply and add: results differ by 1e-7 of their size.

`OPTAX_SPARSE_ADAM_NATIVE=0` in the environment turns it off, `python -m
optax_sparse_adam.native --remove` deletes it; after an update of jaxlib, compile it
anew. A program that uses it cannot be serialised by `jax.export`: turn it off for that.
To see how many CPU devices there are starts JAX's backends, so call
`jax.distributed.initialize` before a step is traced for the first time.
"""

from ._library import available as available
from ._library import build as build
