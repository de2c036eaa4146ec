"""Vocabularies beside a table in one checkpoint of Orbax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import optax_sparse_adam as osa

from ..helpers.support import assert_identical

pytestmark = pytest.mark.slow


def test_a_checkpoint_of_a_table_and_its_vocabularies(tmp_path):
    """All 64 bits are there again, though JAX has none, and the rest is the same."""
    features = {
        "user": osa.Vocabulary(20, min_hits=2, ttl=9),
        "item": osa.Vocabulary(10, score="hits"),
    }

    def assign(features, step):
        keys = np.random.default_rng(step).integers(-(2**63), 2**63, 30)[:6]
        return {name: x.assign(keys, step) for name, x in features.items()}

    for step in range(10):
        assign(features, step)
    params = {"table": jnp.ones((20, 4))}
    with ocp.training.Checkpointer(tmp_path / "run") as saved:
        saved.save(0, {"params": params, "vocab": features})
    with ocp.training.Checkpointer(tmp_path / "run") as saved:
        like = {"params": params, "vocab": features}
        restored = saved.load(0, jax.tree.map(lambda x: x * 0, like))["vocab"]
    assert_identical(restored, features, "as a tree")
    for step in range(10, 20):
        assert_identical(assign(restored, step), assign(features, step), f"step {step}")
