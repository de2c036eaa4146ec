"""Who owns which array: copies, donation, compilations, devices."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.experimental.sparse import BCOO
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optax_sparse_adam.torch_compat import Adafactor, Adam, Parameter, SparseAdam

from ..helpers.support import assert_identical, need_devices
from .test_programs import (
    OURS,
    dense_steps,
    gradient,
    make_dense,
    seen,
    steps,
    table,
    to_numpy,
)


def stepped(count=1):
    """An optimiser whose state is there and whose step is compiled."""
    optimizer = SparseAdam([table(OURS, i) for i in range(count)], lr=0.1)
    steps(OURS, optimizer, 2)
    return optimizer, optimizer.param_groups[0]["params"]


def arrays(optimizer):
    for param, state in optimizer.state.items():
        moments = [x for name, x in state.items() if name != "step"]
        yield from (param.data, *moments)


MAKERS = {
    "numpy": lambda x: x,
    "jax": jnp.array,
    "torch": torch.tensor,
    "bfloat16": lambda x: torch.tensor(x).bfloat16(),
    "requires_grad": lambda x: torch.nn.Parameter(torch.tensor(x)),
    "transposed": lambda x: torch.tensor(x.T.copy()).T,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", ["new", "assigned"])
def test_a_parameter_owns_its_array(kind, how):
    """Large enough that a copy in the background would still be running."""
    source = MAKERS[kind](np.ones((500_000, 8), np.float32))
    if how == "new":
        param = Parameter(source)
    else:
        param = Parameter(np.zeros(3))
        param.data = source
    if kind == "numpy":
        source[...] = 5
    elif kind != "jax":
        source.data.fill_(5)
    assert float(param.data.min()) == float(param.data.max()) == 1
    assert param.dtype == ("bfloat16" if kind == "bfloat16" else "float32")
    data = jnp.ones((1, 8), param.dtype)
    param.grad = BCOO((data, jnp.array([[7]])), shape=param.shape)
    SparseAdam([param], lr=0.5).step()
    assert float(param.data[7, 0]) == pytest.approx(0.5)
    assert source[7, 0].item() == (1 if kind == "jax" else 5)


def test_repr_of_parameters():
    param = Parameter(jnp.zeros((1000, 4)))
    assert repr(param) == "Parameter(float32[1000, 4], grad=None)"
    param.grad = jnp.zeros((1000, 4))
    assert repr(param) == "Parameter(float32[1000, 4], grad=float32[1000, 4])"
    assert repr(Parameter(1.0)) == "Parameter(float32[], grad=None)"


def test_old_arrays_are_an_error_and_copies_stay():
    optimizer, (param,) = stepped()
    old = list(arrays(optimizer))
    copies = [jnp.copy(x) for x in old]
    values = to_numpy(old)
    optimizer.step()
    for array in old:
        with pytest.raises(RuntimeError, match="deleted"):
            array + 1
    assert_identical(to_numpy(copies), values)
    assert not np.array_equal(param.data, values[0])


@pytest.mark.parametrize("view", [np.asarray, np.from_dlpack])
def test_numpy_views_stay(view):
    """The runtime does not overwrite a buffer that someone else is looking at."""
    optimizer, _ = stepped()
    views = [view(x) for x in arrays(optimizer)]
    values = to_numpy(views)
    for _ in range(3):
        optimizer.step()
    assert_identical(to_numpy(views), values)


def adam():
    optimizer = make_dense(OURS, dtype="float32", amsgrad=True)
    dense_steps(OURS, optimizer, 4)
    return optimizer


@pytest.mark.parametrize("make", [lambda: stepped(3)[0], adam], ids=["sparse", "dense"])
def test_steps_are_in_place(make):
    optimizer = make()
    pointers = [x.unsafe_buffer_pointer() for x in arrays(optimizer)]
    assert len(set(pointers)) == len(pointers) >= 9
    for _ in range(3):
        optimizer.step()
        assert [x.unsafe_buffer_pointer() for x in arrays(optimizer)] == pointers


@pytest.mark.parametrize("kind", [SparseAdam, Adafactor])
def test_temporary_memory_does_not_grow_with_the_table(kind):
    def temporary(num_rows):
        shape = (num_rows, 8)
        shapes = {"exp_avg": shape, "exp_avg_sq": shape}
        if kind is Adafactor:
            shapes = {"row_var": (num_rows, 1), "col_var": (1, 8)}
        arrays = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        tables = [(jax.ShapeDtypeStruct(shape, jnp.float32), arrays)] * 2
        grad = jax.eval_shape(lambda: gradient(OURS, 0, shape, 100))
        formula, (group,) = kind._formula, kind([table(OURS)]).param_groups
        scalars = dict.fromkeys(formula.scalars(group, "float32", 1), np.ones(2))
        step = formula.update.lower(tables, [grad, grad], scalars)
        return step.compile().memory_analysis().temp_size_in_bytes

    assert temporary(2_000) == temporary(2_000_000)


def all_rows(data):
    return BCOO((data, jnp.arange(len(data))[:, None]), shape=data.shape)


SAME_BUFFER = {
    "itself": lambda array: array,
    "device_put": lambda array: jax.device_put(array, array.sharding),
    "shard": lambda array: array.addressable_data(0),
    "row_sparse": all_rows,
}


@pytest.mark.parametrize("view", SAME_BUFFER.values(), ids=SAME_BUFFER)
@pytest.mark.parametrize("where", ["group", "optimiser", "optimisers"])
def test_a_gradient_that_is_another_parameter(view, where):
    """That of `sum(x * y)` is `y`: the value when it was set, however the steps go."""
    one, two = table(OURS), table(OURS, 1)
    if where == "optimisers":
        optimizers = [SparseAdam([p], lr=0.1, allow_dense=True) for p in (one, two)]
    else:
        params = [one, two] if where == "group" else [{"params": p} for p in (one, two)]
        optimizers = [SparseAdam(params, lr=0.1, allow_dense=True)]
    alone = [table(OURS), table(OURS, 1)]
    expected = SparseAdam(alone, lr=0.1, allow_dense=True)
    for _ in range(3):
        one.grad, two.grad = view(two.data), view(one.data)
        alone[0].grad, alone[1].grad = (np.array(p.data) for p in alone[::-1])
        for optimizer in (*optimizers, expected):
            optimizer.step()
    for optimizer in (*optimizers, expected):
        optimizer.step()  # with the gradients of before
    for param, other in zip((one, two), alone, strict=True):
        np.testing.assert_allclose(param.data, other.data, rtol=1e-6)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_gradient_that_is_a_moment(loaded):
    optimizer, (one, two) = stepped(2)
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    moment = optimizer.state[one]["exp_avg"]
    value = np.array(moment)
    one.grad, two.grad = all_rows(moment), all_rows(moment)
    optimizer.step()
    assert_identical(two.grad.data, jnp.asarray(value))
    assert_identical(one.grad.data, jnp.asarray(value))


def test_parameters_made_of_one_array():
    array = jnp.ones((6, 3))
    one, two = Parameter(array), Parameter(array)
    three = Parameter(one.data)
    two.data = one.data
    optimizer = SparseAdam([one, two, three], lr=0.1)
    steps(OURS, optimizer, 2)
    assert not array.is_deleted()
    assert len({p.data.unsafe_buffer_pointer() for p in (one, two, three)}) == 3


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copied_parameter_has_its_own_array(make_copy):
    """Steps of one do not reach the other, nor delete its array."""
    optimizer, (param,) = stepped()
    other = make_copy(param)
    assert other != param
    assert other.grad is None
    assert_identical(other.data, jnp.copy(param.data))
    before = np.array(other.data)
    optimizer.step()
    np.testing.assert_array_equal(other.data, before)
    after = np.array(param.data)
    steps(OURS, SparseAdam([other]), 1)
    np.testing.assert_array_equal(param.data, after)


def test_dense_gradients_on_request():
    """Every row is touched (lucid's SparseAdam): the formula is the same."""
    for options in ({}, {"maximize": True, "betas": (0.5, 0.75)}):
        groups = [{"params": [table(OURS)]}, {"params": [table(OURS)]}]
        optimizer = SparseAdam(groups, 0.1, allow_dense=True, **options)
        dense, sparse = (group["params"][0] for group in optimizer.param_groups)
        for i in range(4):
            sparse.grad = gradient(OURS, i, nse=20)
            dense.grad = sparse.grad.todense()
            assert set(sparse.grad.indices.ravel().tolist()) == set(range(6))
            optimizer.step()
        np.testing.assert_allclose(dense.data, sparse.data, rtol=1e-6)
    optimizer.zero_grad(set_to_none=False)
    assert not dense.grad.any()
    assert not sparse.grad.data.any()


@pytest.mark.parametrize("make", [lambda: stepped()[0], adam], ids=["sparse", "dense"])
def test_groups_that_change_compile_nothing(make, compilations):
    optimizer = make()
    group = optimizer.param_groups[0]
    param, schedule = group["params"][-1], optax.constant_schedule(0.1)
    changes = [{"lr": 0.3}, {"lr": schedule}, {"lr": np.array([0.01])}, {"eps": 0.5}]
    changes += [{"betas": (0.1, 0.2)}, {"maximize": True}, {"maximize": False}]
    if "weight_decay" in group:
        changes += [{"weight_decay": 0.1}, {"decoupled_weight_decay": True}]
    del compilations[:]
    for change in changes:
        group.update(change)
        before = np.array(param.data)
        optimizer.step()
        assert not np.array_equal(param.data, before)
    assert compilations == []


def test_a_step_that_fails_changes_no_array():
    optimizer, (param, other) = stepped(2)
    before = seen(optimizer)
    good = other.grad
    scaled = jax.tree.map(lambda x: -0.1 * x.astype("float32"), good)
    for bad, error in ((jnp.zeros((6, 3)), RuntimeError), (scaled, TypeError)):
        other.grad = bad
        with pytest.raises(error):
            optimizer.step()
        assert_identical(seen(optimizer), before)
    other.grad = good
    optimizer.step()
    assert not np.array_equal(param.data, before[0][0][0])


def test_sharded_parameters_stay_sharded():
    need_devices(2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    alone = table(OURS)
    param = Parameter(jax.device_put(alone.data, sharding))
    optimizers = [SparseAdam([p], lr=0.1) for p in (alone, param)]
    for optimizer in optimizers:
        steps(OURS, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        steps(OURS, optimizer, seed=1)
    for ours, expected in zip(*map(arrays, optimizers[::-1]), strict=True):
        assert ours.sharding == sharding
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_a_group_on_several_devices():
    need_devices(3)
    alone, *params = (table(OURS) for _ in range(4))
    for param, device in zip(params, jax.devices()[1:3] * 2, strict=False):
        param.data = jax.device_put(param.data, device)
    optimizer = SparseAdam([alone, *params], lr=0.1)
    for i in range(3):
        for param in (alone, *params):
            grad = gradient(OURS, i)
            if param is not alone:
                grad = jax.device_put(grad, param.data.sharding)
            param.grad = grad
        optimizer.step()
    for param, device in zip(params, jax.devices()[1:3] * 2, strict=False):
        assert param.data.devices() == {device}
        np.testing.assert_array_equal(param.data, alone.data)


IN_JIT = {
    "data": lambda param, x: setattr(param, "data", x),
    "gradient": lambda param, x: setattr(param, "grad", x),
    "row-sparse gradient": lambda param, x: setattr(param, "grad", all_rows(x)),
    "step of SparseAdam": lambda param, x: SparseAdam([param], allow_dense=True).step(),
    "step of Adam": lambda param, x: Adam([param]).step(),
}


@pytest.mark.parametrize("what", IN_JIT)
def test_outside_of_jit_only(what):
    """Nothing has changed, and a step outside goes on."""
    param = Parameter(jnp.zeros((6, 2)))
    param.grad = before = jnp.ones((6, 2))
    with pytest.raises(RuntimeError, match=r"side of jit"):
        jax.jit(lambda x: IN_JIT[what](param, x))(jnp.ones((6, 2)))
    assert not param.data.any()
    np.testing.assert_array_equal(param.grad, before)
    SparseAdam([param], lr=0.1, allow_dense=True).step()
    np.testing.assert_allclose(param.data, -0.1, rtol=1e-5)
