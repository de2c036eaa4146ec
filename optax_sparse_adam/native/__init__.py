"""A kernel for CPUs: sums and Adam in one pass over the touched rows; reads and writes.

An installation from source compiles it where it finds a C++ compiler: `CXX`, a command
in which a path with blanks is quoted, or else c++, g++ or clang++.
`python -m optax_sparse_adam.native` compiles it later, into the user's cache
(`XDG_CACHE_HOME`, else `~/.cache`), and that one goes first unless it is for an older
jaxlib. With `--status` it says whether the kernel is used, with `--remove` it empties
the cache.

It has run on Linux, compiled by GCC and by Clang: on x86-64, and on an emulated ARM
processor. For macOS it compiles and links; nobody has run it there. There is none on
Windows.

It is used on CPUs without being asked for, in processes that have one CPU device and
have not called `jax.distributed.initialize`, for tables with one sparse axis and
`int32` ids:

- Sums of duplicates, the steps of `sparse_adam` and `exact_adam`, and `apply_updates`:
  of float32. Moments of `sparse_adam` and tables may be bfloat16.
- Lookups inside of `value_and_grad` and `grad`, of whole rows by one id each: of 17 to
  79 float32, which XLA copies one number at a time, and of all that `read=state` brings
  up to date.
- Rows of bfloat16 tables and moments, for every optimiser and lookup: XLA for CPUs
  widens the whole of them (before jaxlib 0.11.2).
- States of 4 MB or more that `init` makes: in huge pages, on Linux.

Everything else, and every machine without it, takes the path in plain JAX; so do
derivatives and `vmap` of all this. Rows and sums are the same bit for bit. The steps
round each operation once, where XLA contracts multiply and add: results differ by 1e-7
of their size.

A library serves each jaxlib whose version of XLA's foreign function interface is that
of the headers it was compiled with, or a later one with the same major version: XLA
takes older ones for 12 months at least. They are the headers of the jaxlib in the
environment. Where a build cannot see it, they are those of the newest one, and for an
older jaxlib the kernel may have to be compiled by the command.

`OPTAX_SPARSE_ADAM_NATIVE=0` in the environment turns it off, of an installation and of
a process. `jax.export` raises for programs that use it, since their "custom calls have
no compatibility guarantees": turn it off for that. Or, where it is there for those who
load the program, too, and they call `available()` first, pass to `jax.export.export`
`disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target) for target in
("optax_sparse_adam.adam_rows", "optax_sparse_adam.add_rows",
"optax_sparse_adam.exact_adam_rows", "optax_sparse_adam.put_rows",
"optax_sparse_adam.sum_rows", "optax_sparse_adam.take_rows",
"optax_sparse_adam.take_rows_now", "optax_sparse_adam.zeros")]`.
"""

from ._library import available as available
from ._library import build as build
from ._library import status as status
