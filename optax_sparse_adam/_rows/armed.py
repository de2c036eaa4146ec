"""Gradients whose indices raise where arithmetic is done to them.

`make_train_step` and `flax_nnx.update` ask of an optimiser whether it takes row-sparse
gradients, by tracing it. `scale(-1)` is arithmetic of integers and of float8, so that
the trace of `chain(sparse_adam(0.1), optax.scale(-1))` says yes, and its program makes
NaN. An armed gradient, and what is made of it, has a guard of a type that JAX selects,
moves and fills, but has no arithmetic of: an array of PRNG keys, of an implementation
without random numbers. So that raises, and the caller says what to do. Not all
gradients are armed: what is harmless would raise, too, as `np.asarray` and `np.testing`
on the leaves, `flax.serialization`, `process_allgather`. Known limit: so does a choice
between all arrays and a Python number, `jnp.where(is_good, x, 0)`; one between these
and `jnp.zeros_like(x)` does not.
"""

import copy
from typing import Any

import jax
from jax.experimental.sparse import BCOO

from .canary import CanaryBCOO
from .canary_arrays import armed_guard, is_armed_guard, new_guard


def armed(tree: Any) -> Any:
    """A tree whose row-sparse gradients are armed: see the module."""

    def arm(x: Any) -> Any:
        if not isinstance(x, CanaryBCOO):
            return x
        x = copy.copy(x)
        x.guard = armed_guard(x.stored_indices)
        return x

    return jax.tree.map(arm, tree, is_leaf=lambda x: isinstance(x, BCOO))


def disarmed(tree: Any) -> Any:
    """A tree that was made of armed gradients, without armed guards."""

    def disarm(x: Any) -> Any:
        return new_guard(x[..., None]) if is_armed_guard(x) else x

    def of_leaf(x: Any) -> Any:
        if not isinstance(x, CanaryBCOO):
            return disarm(x)
        x = copy.copy(x)
        x.guard = disarm(x.guard)
        return x

    return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, BCOO))
