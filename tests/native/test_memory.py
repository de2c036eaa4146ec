"""`keep_memory`: a step above 32 MB finds the memory of the last one."""

import sys

import pytest

from optax_sparse_adam.native import keep_memory

from ..helpers.native import python

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


def test_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_memory() is False
