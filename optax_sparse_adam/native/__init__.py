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

`coalesce`, `sparse_adam`, `apply_updates` and everything that lifts rows use it by
themselves on CPUs, for tables of float32 with one sparse axis and `int32` ids, in
processes that have one CPU device and have not called `jax.distributed.initialize`.
Tables and moments of bfloat16 it reads and writes for every optimiser, because XLA for
CPUs (jaxlib 0.10) widens the whole of them. `value_and_grad` and `grad`
use it there to look up whole rows of 17 to 79 numbers, by one `int32` id each, in
tables whose gradient is row-sparse: XLA copies such rows one number at a time; and, of
any width, rows that the state of `exact_adam` brings up to date, and for its step.
Everything else, and every machine without it, takes the path in plain JAX; so do
derivatives and `vmap` of all this. Rows and sums are the same bit for bit. Adam rounds
each operation once, where XLA contracts multiply and add: results differ by 1e-7 of
their size.

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
