"""A kernel for CPUs: sums and an optimiser in one pass over the touched rows; lookups.

An installation from source compiles it where it finds a C++ compiler: `CXX`, a command
in which a path with blanks is quoted, or else c++, g++ or clang++.
`python -m optax_sparse_adam.native` compiles it later, into the user's cache
(`XDG_CACHE_HOME`, else `~/.cache`), and that one takes precedence unless it is for an
older jaxlib. With `--status` it says whether the kernel is used, with `--remove` it
empties the cache. Where there are only CPUs and a compiler, a process without the
kernel warns once.

It has run on Linux, compiled by GCC and by Clang: on x86-64, and on an emulated ARM
processor. For macOS it compiles and links; nobody has run it there. There is none on
Windows.

On CPUs it is used by default, in processes that have one CPU device and have not called
`jax.distributed.initialize`, for tables with one sparse axis and `int32` ids:

- Sums of duplicates, of float32; the step of `sparse_adam`, with moments of float32 or
  bfloat16; `apply_updates`, with tables of either.
- The steps of `rowwise_adagrad` and `rowwise_adam`, with one second moment a row, of
  float32; of a float32 table if weights decay.
- The sums of `embedding_bag`, and all of these steps from the gradients of its bags.
- The step of `exact_adam` and lookups with `read=state`, all of float32, in tables of
  at most two axes.
- Other lookups inside of `value_and_grad` and `grad`, of whole rows of 17 float32 and
  more by one id each: XLA copies those of 17 to 79 one number at a time, and memory for
  more than 32 MB of rows it takes from the system in small pages.
- Rows of bfloat16 tables and moments, for every optimiser and lookup: XLA for CPUs
  widens the whole of them (before jaxlib 0.11.2).
- Arrays of zeros of 4 MiB or more that `init` of this library's optimisers makes: in
  huge pages, on Linux.

Everything else, and every machine without it, takes the path in plain JAX; so do
derivatives and `vmap` of all this, but that of lookups over batches of ids, which is
one lookup. Rows as they are stored, and sums, are the same bit for bit. Steps, and rows
that are brought up to date, differ by 1e-7 of their size: XLA contracts multiply and
add, and the kernel leaves out what a float does not hold.

A library serves each jaxlib whose version of XLA's foreign function interface is that
of the headers it was compiled with, or a later one with the same major version: XLA
takes older ones for 12 months at least. They are the headers of the jaxlib in the
environment. Where a build cannot see it, they are those of the newest one, and for an
older jaxlib the kernel may have to be compiled by the command.

`OPTAX_SPARSE_ADAM_NATIVE=0` in the environment turns it off, while installing or in a
process. It is read when a program is traced, and what JAX has traced it keeps, parts of
other programs among them: to change it after the first step, in `os.environ`, call
`jax.clear_caches()` next, and all is traced again. Turn it off to compile ahead for
another platform, too: a process that uses the kernel and has CPUs only
(`JAX_PLATFORMS=cpu`, or no package for other platforms) leaves all for others out,
which halves the time of tracing. Compiled for a GPU such a program raises: `No
registered implementation for custom call to optax_sparse_adam`.
`jax.export` raises for programs that use it, since their "custom calls have no
compatibility guarantees": turn it off for that. Or keep it: if those who load the
program have the kernel and call `available()` first, pass to `jax.export.export`
`disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target) for target in
("optax_sparse_adam.read", "optax_sparse_adam.update", "optax_sparse_adam.zeros")]`.
"""

from ._gpu import gpu_status as gpu_status
from ._library import available as available
from ._library import build as build
from ._library import status as status
from ._memory import keep_memory as keep_memory
