"""Calls of the kernel made by hand, with wrong numbers in arrays of right shapes."""

import subprocess

import jax
import numpy as np
import pytest

from optax_sparse_adam.native import _build

from ..helpers.kernel_cases import call, right_calls, wrong_contents
from ..helpers.native import needs_compiler, python

CORE = ("update adam", "update sum")


@needs_compiler
def test_wrong_entries_are_refused_and_nothing_is_written(cache):
    """Unsorted ones wrote a row behind the table, and equal rows in two parts raced."""
    cases = [(what, case) for what, case in wrong_contents() if case[0] in CORE]
    for _, case in cases:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as error:
            call(*case)
        assert "takes entries as `order` makes them" in str(error.value)


@needs_compiler
def test_entries_of_many_parts(cache):
    """What `order` makes is taken, also where rows go on from one part to the next."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 10, 3000))
    entries = np.stack([ids, rng.permutation(3000)], 1).astype(np.int32)
    name, operands, results, owners, own = next(
        x for x in right_calls() if x[0] == "update sum"
    )
    larger = [
        {
            key: (((3000, *shape[1:]) if len(shape) == 2 else shape), dtype)
            for key, (shape, dtype) in items.items()
        }
        for items in (operands, results)
    ]
    indices, sums, count = call(name, *larger, owners, own, {"entries": entries})
    found = dict(zip(indices[:, 0].tolist(), sums[:, 0].tolist(), strict=True))
    rows, counts = np.unique(ids[ids < 9], return_counts=True)
    assert int(count) == len(rows)
    assert {row: found[row] for row in rows} == dict(zip(rows, counts, strict=True))


# Memory for the rows of one part of an update is refused, on whichever thread it is.
FAILING_NEW = """
#include <cstddef>
#include <cstdlib>
#include <new>
inline constexpr std::size_t kRefused = 3 * 1237 * 4;  // of `adam`, of this width
void* operator new(std::size_t size) {
  if (size == kRefused) throw std::bad_alloc();
  if (void* found = std::malloc(size)) return found;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
"""

WITHOUT_MEMORY = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.sparse import BCOO
import optax_sparse_adam as osa
from optax_sparse_adam.native import _calls, _library

_library.register(sys.argv[1])
_calls.available = lambda: True
tx = osa.sparse_adam(0.1)
for width in (1237, 1236):
    ids = jnp.arange(6000, dtype="int32")[:, None] % 5000
    grad = BCOO((jnp.ones((6000, width)), ids), shape=(5000, width))
    table = jnp.zeros(grad.shape)
    step = jax.jit(lambda grad, state, table: tx.update(grad, state, table)[1].nu)
    for _ in range(10 if width == 1237 else 1):
        try:
            found = step(grad, tx.init(table), table)
            print(width, float(found.max()) > 0)
        except jax.errors.JaxRuntimeError as error:
            print(width, str(error)[:18])
"""


@pytest.mark.slow
@needs_compiler
def test_no_memory_on_a_thread_of_the_pool(tmp_path):
    """It ended the process; now the step raises, and the next one runs."""
    header = tmp_path / "new.h"
    header.write_text(FAILING_NEW)
    library = tmp_path / "library.so"
    command = [*_build.compiler(), *_build.FLAGS.split(), "-O1", f"-include{header}"]
    command += [f"-isystem{jax.ffi.include_dir()}", str(_build.SOURCE), "-o", library]
    subprocess.run(command, check=True)
    done = python("-c", WITHOUT_MEMORY, str(library), XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1237 RESOURCE_EXHAUSTED"] * 10 + ["1236 True"]
