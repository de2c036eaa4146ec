"""Types in a loss that are no arrays: mutable variables of Flax, and types of users.

Each is compared with what JAX or Flax do for it, or with the same model of ordinary
variables. What a version of Flax or JAX refuses itself is told by `REFUSES`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import hijax

import optax_sparse_adam as osa
from optax_sparse_adam import flax_nnx

from ..helpers.gradients import dense, is_bcoo
from ..helpers.optimizers import OPTIMIZERS
from ..helpers.support import TOLERANCE, assert_close, assert_identical, slow_but

IDS = jnp.array([3, 7, 3, 5])
# With JAX 0.12, Flax sets variables that are no mutable arrays outside of programs.
NEW_FLAX = not hasattr(hijax, "HiPrimitive")
TYPES = {
    "hijax": {"hijax": True},
    "ref": {"ref": True},
    "ref of hijax": {"hijax": True, "ref": True},
}


@pytest.fixture(autouse=True)
def default_promotion(strict):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nnx.Module):
    """Flax's example of mutable variables, with a table in front."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(20, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, deterministic=False, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.before = nnx.Variable(jnp.array(9))

    def __call__(self, ids):
        self.before[...] = self.calls[...]
        self.calls[...] += 1
        return self.out(nnx.relu(self.dropout(self.norm(self.embed(ids)))))


def mean_square(model):
    return jnp.mean((model(IDS) - 1) ** 2)


def parts(model):
    """`jax.grad` of the parameters, as Flax does it for mutable variables."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return mean_square(nnx.merge(graphdef, params, rest))

    return loss, nnx.with_vars(params, hijax=False, ref=False)


def by_parts(value_and_grad, model):
    loss, params = parts(model)
    return value_and_grad(loss)(params)


def by_module(value_and_grad, model):
    return value_and_grad(mean_square)(model)


def train(types, gradient, how, tx):
    """Two steps: the values, all that the model holds in the end, what is sparse."""
    with nnx.var_defaults(**({"hijax": False, "ref": False} | types)):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kinds = set()

    def step(model, optimizer):
        value, grads = gradient(model)
        kinds.add(is_bcoo(nnx.to_pure_dict(grads)["embed"]["embedding"]))
        optimizer.update(model, grads)
        return value

    if how == "closed over":
        compiled = jax.jit(lambda: step(model, optimizer))
        values = [compiled() for _ in range(2)]
    else:
        compiled = jax.jit(step) if how == "an argument" else step
        values = [compiled(model, optimizer) for _ in range(2)]
    state = nnx.with_vars(nnx.state(model), hijax=False, ref=False)
    arrays = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return values, arrays, kinds


@functools.cache
def reference():
    """The model of ordinary variables under Flax's own gradient."""
    gradient = functools.partial(by_module, nnx.value_and_grad)
    return train({}, gradient, "eagerly", optax.sgd(0.1))


BY_MODULE = functools.partial(by_module, flax_nnx.value_and_grad)
BY_PARTS = functools.partial(by_parts, osa.value_and_grad)
RUNS = [
    ("hijax", BY_MODULE, "eagerly"),
    ("hijax", BY_MODULE, "closed over"),
    ("hijax", BY_MODULE, "an argument"),
    ("hijax", BY_PARTS, "eagerly"),
    ("hijax", BY_PARTS, "closed over"),  # Flax's example
    ("ref", BY_MODULE, "eagerly"),
    ("ref", BY_MODULE, "closed over"),
    ("ref", BY_MODULE, "an argument"),
    ("ref", BY_PARTS, "closed over"),
    ("ref", BY_PARTS, "an argument"),
    ("ref of hijax", BY_MODULE, "eagerly"),
]


def refuses(types, gradient, how):
    """What Flax refuses: to set such variables inside of transformations."""
    if types == "hijax":
        return NEW_FLAX and (how != "eagerly" or gradient is BY_PARTS)
    return types == "ref" and gradient is BY_PARTS and not NEW_FLAX


@pytest.mark.slow
@pytest.mark.parametrize("run", slow_but(RUNS, RUNS[2], RUNS[4], is_one_value=True))
def test_trained_as_with_ordinary_variables(run):
    if refuses(*run):
        pytest.skip("Flax refuses it")
    types, gradient, how = run
    tx = osa.lazy(optax.sgd(0.1))
    values, state, kinds = train(TYPES[types], gradient, how, tx)
    expected, expected_state, _ = reference()
    assert kinds == {True}
    tol = TOLERANCE["float32"].numpy
    for got, wanted in zip(values, expected, strict=True):
        assert_close(got, wanted, tol)
    for got, wanted in zip(state, expected_state, strict=True):
        assert_close(got, wanted, tol, magnitude=1.0)


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, "sparse_adam", "exact_adam"))
def test_init_of_mutable_variables(name):
    tx = OPTIMIZERS[name].make(0.1)
    table = np.ones((20, 4), np.float32)
    for types in ({"hijax": True}, {"ref": True}):
        state = tx.init({"table": nnx.Param(jnp.asarray(table), **types)})
        plain = tx.init({"table": jnp.asarray(table)})
        for got, wanted in zip(*map(jax.tree.leaves, (state, plain)), strict=True):
            assert_identical(got, wanted)


def test_a_mutable_variable_has_no_gradient():
    params = {"table": nnx.Param(jnp.ones((20, 4)), hijax=True)}
    with pytest.raises(TypeError, match=r"\['table'\].*hijax=False"):
        osa.grad(lambda params: jnp.sum(params["table"][IDS]))(params)


@pytest.mark.slow
def test_a_change_of_structure_is_refused():
    def loss(model):
        model.more = nnx.Variable(jnp.array(1.0))
        return mean_square(model)

    with nnx.var_defaults(hijax=True):
        model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match="structure of a module with mutable variables"):
        flax_nnx.grad(loss)(model)


# A type of a user's own, with derivatives of its own: a pair of which the second array
# scales the first one, whose derivative is doubled.


class Scaled:
    def __init__(self, array, scale):
        self.array, self.scale = array, scale


class ScaledType(hijax.HiType):
    def __init__(self, shape):
        self.shape_of_array = shape

    def __hash__(self):
        return hash(self.shape_of_array)

    def __eq__(self, other):
        same = isinstance(other, ScaledType)
        return same and self.shape_of_array == other.shape_of_array

    def lo_ty(self):
        return [
            hijax.ShapedArray(self.shape_of_array, jnp.dtype("float32")),
            hijax.ShapedArray((), jnp.dtype("float32")),
        ]

    def lower_val(self, hi_val):
        return [hi_val.array, hi_val.scale]

    def raise_val(self, array, scale):
        return Scaled(array, scale)

    def to_tangent_aval(self):
        return hijax.ShapedArray(self.shape_of_array, jnp.dtype("float32"))

    def str_short(self, short_dtypes=False, **_):
        return f"Scaled{self.shape_of_array}"


hijax.register_hitype(Scaled, lambda x: ScaledType(x.array.shape))

if hasattr(hijax, "HiPrimitive"):  # JAX 0.10 and 0.11

    class MakeScaled(hijax.HiPrimitive):
        def abstract_eval(self, array, scale):
            return ScaledType(array.shape), set()

        def to_lojax(self, array, scale):
            return Scaled(array, scale)

        def jvp(self, primals, tangents):
            return make_p.bind(*primals), 2 * hijax.instantiate_zeros(tangents[0])

    class ReadScaled(hijax.HiPrimitive):
        def abstract_eval(self, x):
            return hijax.ShapedArray(x.shape_of_array, jnp.dtype("float32")), set()

        def to_lojax(self, x):
            return x.array * x.scale

        def jvp(self, primals, tangents):
            return read_p.bind(*primals), hijax.instantiate_zeros(tangents[0])

    make_p, read_p = MakeScaled("make_scaled"), ReadScaled("read_scaled")


def doubled(rows):
    return read_p.bind(make_p.bind(rows, jnp.float32(3)))


def in_a_scan(t):
    def step(total, i):
        return total + jnp.sum(doubled(t[i][None]) ** 2), None

    return lax.scan(step, 0.0, IDS)[0]


def closed_over_in_a_scan(t):
    x = make_p.bind(lax.stop_gradient(t[IDS]), jnp.float32(3))

    def step(total, i):
        return total + jnp.sum(t[i] * read_p.bind(x)[0]), None

    return lax.scan(step, 0.0, IDS)[0]


def in_a_branch(t):
    return lax.cond(
        t[0, 0] > 9, lambda t: jnp.sum(t[IDS]), lambda t: jnp.sum(doubled(t[IDS])), t
    )


# Whether the gradient is row-sparse.
PROGRAMS = {
    "rows": (lambda t: jnp.sum(doubled(t[IDS]) ** 2), True),
    "a table": (lambda t: jnp.sum(doubled(t)[IDS] ** 2), False),
    "rows, and a table": (lambda t: jnp.sum(doubled(t[IDS]) * jnp.sum(t)), False),
    "a constant": (
        lambda t: jnp.sum(t[IDS] * doubled(lax.stop_gradient(t[IDS]))),
        True,
    ),
    "of integers": (
        lambda t: jnp.sum(t[jnp.int32(doubled(IDS[:, None] * 1.0)[:, 0] / 3)] ** 2),
        True,
    ),
    "jit": (lambda t: jnp.sum(jax.jit(doubled)(t[IDS]) ** 2), True),
    "checkpoint": (lambda t: jnp.sum(jax.checkpoint(doubled)(t[IDS]) ** 2), True),
    "a type through jit": (
        lambda t: jnp.sum(jax.jit(read_p.bind)(make_p.bind(t[IDS], jnp.float32(3)))),
        True,
    ),
    "scan": (in_a_scan, True),
    "closed over in a scan": (closed_over_in_a_scan, True),
    "cond": (in_a_branch, True),
    "frozen": (
        lambda t: jnp.sum(t[IDS] + jnp.sum(doubled(lax.stop_gradient(t)))),
        True,
    ),
}


@pytest.mark.skipif(not hasattr(hijax, "HiPrimitive"), reason="other names in JAX 0.12")
@pytest.mark.parametrize("name", slow_but(PROGRAMS, "rows", "cond"))
def test_types_of_users(name):
    loss, is_sparse = PROGRAMS[name]
    table = jnp.asarray(np.random.default_rng(0).normal(size=(20, 4)), jnp.float32)
    grad, expected = osa.grad(loss)(table), jax.jit(jax.grad(loss))(table)
    assert is_bcoo(grad) == is_sparse
    assert_close(dense(grad), expected, TOLERANCE["float32"].sum, magnitude=1.0)


@pytest.mark.skipif(not hasattr(hijax, "HiPrimitive"), reason="other names in JAX 0.12")
def test_leaves_of_other_types():
    """What JAX differentiates, by its own rules; lookups beside it are row-sparse."""
    table = jnp.ones((20, 4))
    params = {"x": Scaled(jnp.ones((2, 4)), jnp.float32(3)), "table": table}

    def loss(params):
        return jnp.sum(params["table"][IDS] ** 2) + jnp.sum(read_p.bind(params["x"]))

    grads, expected = osa.grad(loss)(params), jax.jit(jax.grad(loss))(params)
    assert is_bcoo(grads["table"])
    assert_identical(grads["x"], expected["x"])
    assert_close(osa.evaluate(loss)(params), loss(params), 1e-6)
