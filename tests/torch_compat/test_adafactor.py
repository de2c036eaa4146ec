"""The shim beside `torch.optim`: Adafactor."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam.torch_compat import Adafactor

from .test_adam import changed_options, refused_options, round_trips
from .test_programs import (
    OURS,
    assert_same,
    check,
    dense_steps,
    gradient,
    make_dense,
    seen,
    table,
    to_numpy,
)

STORIES = []
SHAPES = [(), (1,), (5,), (4, 3), (1, 3), (4, 1), (2, 3, 4), (2, 1, 3, 2)]


def make(world, shapes=SHAPES, **options):
    return make_dense(world, "Adafactor", shapes=shapes, **options)


OPTIONS = {
    "defaults": {},
    "large_steps": {"lr": 0.5, "beta2_decay": -0.5},
    "lr_zero": {"lr": 0.0, "weight_decay": 0.1},
    "eps": {"eps": (0.1, 0.5), "lr": 1.0},
    "clipping": {"d": 2.5, "lr": 0.3},
    "weight_decay": {"weight_decay": 0.1, "lr": 0.3},
    "maximize": {"maximize": True, "weight_decay": 0.5, "foreach": True},
    "not_foreach": {"foreach": False, "eps": (1e-30, 1e-3)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)]
)
def test_results(options, dtype):
    def story(world):
        optimizer = make(world, dtype=dtype, **options)
        return [dense_steps(world, optimizer, seed=seed)[-1] for seed in range(3)]

    with jax.enable_x64(dtype == "float64"):
        # A step is divided by the root mean square of the update: all errors meet.
        check(story, {"float32": 2e-6, "float64": 1e-12}[dtype])


@STORIES.append
def steps_that_are_scalars(world):
    """As older torch saved them; and before `foreach` was an option."""
    optimizer = make(world)
    dense_steps(world, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    del saved["param_groups"][0]["foreach"]
    optimizer.load_state_dict(saved)
    log = [seen(optimizer)]
    return log, dense_steps(world, optimizer)


for story in (round_trips, changed_options, refused_options):
    STORIES.append(functools.partial(story, kind="Adafactor"))


@pytest.mark.parametrize("story", STORIES)
def test_as_torch(story):
    with jax.enable_x64(True):
        check(story, 1e-12)


def test_row_sparse_gradients():
    """The functional Adafactor, in place; a dense one of all rows is the same."""
    optimizer = Adafactor([table(OURS), table(OURS)], lr=0.1, weight_decay=0.1)
    sparse, dense = optimizer.param_groups[0]["params"]
    params = sparse.data
    tx = osa.sparse_adafactor(0.1, weight_decay=0.1)
    params = jnp.copy(params)
    state = tx.init(params)
    for i, nse in enumerate((20, 20, 0, 20)):
        sparse.grad = gradient(OURS, i, nse=nse)
        dense.grad = sparse.grad.todense()
        optimizer.step()
        updates, state = tx.update(sparse.grad, state, params)
        params = osa.apply_updates(params, updates)
        assert_same(to_numpy(sparse), np.asarray(params), 1e-6)
        if i < 2:
            assert_same(to_numpy(sparse), to_numpy(dense), 1e-6)
    moments = optimizer.state[sparse]
    assert moments["step"] == 4
    np.testing.assert_allclose(moments["row_var"][:, 0], state.v_row, rtol=1e-6)
    np.testing.assert_allclose(moments["col_var"][0], state.v_col, rtol=1e-6)
