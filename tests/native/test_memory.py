"""Pages that are mapped for a step above 32 MB: few, and none with `keep_memory`."""

import subprocess
import sys

import pytest

from optax_sparse_adam._jax_extras import huge_pages
from optax_sparse_adam.native import _build, keep_memory

from ..helpers.native import needs_compiler, python

FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from optax_sparse_adam.native import keep_memory

if sys.argv[1] == "keep":
    assert keep_memory()
ids = jnp.arange(9)

@jax.jit
def function(ids):  # with 64 MB of temporary memory
    return jnp.zeros((1_000_000, 16)).at[ids].add(1.0)[ids]
counts = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(function(ids))
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="not on Linux")
def test_pages_are_kept():
    for how in ("map", "keep"):
        done = python("-c", FAULTS, how, XLA_FLAGS="")
        assert done.returncode == 0, done.stderr
        assert (int(done.stdout) < 1000) == (how == "keep")


STEPS = """
import resource
import jax, jax.numpy as jnp
import optax_sparse_adam as osa

assert osa.native.available()
tx = osa.sparse_adam(0.1)
ids = jnp.arange(9_000) % 7_000

def loss(table, ids):  # 41 MB of rows, and then in their place the gradient
    return jnp.mean(jnp.tanh(table[ids] @ jnp.ones(1_200)))

def by_hand(table, state, ids):
    value, grad = osa.value_and_grad(loss)(table, ids)
    updates, state = tx.update(grad, state, table)
    return osa.apply_updates(table, updates), state, value

for step in (osa.make_train_step(loss, tx), jax.jit(by_hand, donate_argnums=(0, 1))):
    table = jnp.ones((10_000, 1_200))
    state, counts = tx.init(table), []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        table, state, _ = jax.block_until_ready(step(table, state, ids))
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(min(counts))
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not huge_pages._madvise() is not None, reason="no huge pages here")
def test_rows_lie_in_huge_pages(cache):
    """Without `keep_memory`: 41 MB are 10,547 pages of 4 kB."""
    done = python("-c", STEPS, XDG_CACHE_HOME=str(cache), XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert all(int(count) < 3_000 for count in done.stdout.split()), done.stdout


def test_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_memory() is False


# Another allocator: by its `malloc` alone, as jemalloc, and with a `mallopt` that says
# that all is well, as tcmalloc.
ALLOCATORS = {
    "jemalloc": "",
    "tcmalloc": "int mallopt(int key, int value) { return 1; }",
}
ALLOCATOR = """
#include <cstddef>
extern "C" {
void* __libc_malloc(std::size_t);
void __libc_free(void*);
void* malloc(std::size_t size) { return __libc_malloc(size); }
void free(void* data) { __libc_free(data); }
%s
}
"""
KEEP = "from optax_sparse_adam.native import _memory; print(_memory.keep_memory())"


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="not on Linux")
@pytest.mark.parametrize("name", [None, *ALLOCATORS])
def test_another_allocator(name, tmp_path):
    """Where it is preloaded, the settings of glibc change nothing."""
    source, library = tmp_path / "allocator.cc", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR % ALLOCATORS.get(name, ""))
    command = [*_build.compiler(), "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    done = python("-c", KEEP, **({"LD_PRELOAD": str(library)} if name else {}))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name is None}\n"
