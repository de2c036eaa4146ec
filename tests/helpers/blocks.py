"""Which tables `lazy` updates by themselves, and the same update at once."""

import contextlib

import jax
import pytest

from optax_sparse_adam._optimizers import lazy
from optax_sparse_adam._optimizers.lazy_row_analysis import split_update
from optax_sparse_adam._rows.checks import is_leaf


def lower(tx, grads, params, how="lower", donate=(), state=None, **extra):
    """The lowered update, and which leaves are updated by themselves, by name."""
    state = jax.eval_shape(tx.init, params) if state is None else state
    update = jax.jit(lambda *args: tx.update(*args, **extra), donate_argnums=donate)
    with recorded() as taken:
        lowered = getattr(update, how)(grads, state, params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in leaves]
    return lowered, {names[i] for formulas in taken for i in formulas}


@contextlib.contextmanager
def recorded():
    """A list that gets what each `lazy` takes apart while it is traced."""
    taken = []

    def record(*args):
        split = split_update(*args)
        taken.append(split.formulas)
        return split

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy, "split_update", record)
        yield taken


def at_once(function, *args):
    """The result of a program in which `lazy` updates all rows at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy, "compact_shapes", lambda table: None)
        return jax.jit(lambda *args: function(*args))(*args)
