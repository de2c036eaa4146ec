"""`make_train_step`: which gradients, keywords and transformations it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_sparse_adam as osa

from ..helpers.optimizers import OPTIMIZERS
from ..helpers.support import (
    NumpyAdam,
    assert_close,
    assert_identical,
    row_sums,
    slow_but,
)

pytestmark = pytest.mark.usefixtures("as_optax_expects")

ROWS, DIM, RATE = 12, 3, 0.1
IN_KERNEL = {"sparse_adam", "rowwise_adagrad", "rowwise_adam"}
IN_KERNEL |= {"exact_adam", "exact_adamw"}
IDS = [np.array([3, 7, 3]), np.array([5, 7, 9])]
INNER = osa.sparse_adam(RATE)  # a global, which no closure holds


def start():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32)
    return {"table": table, "w": jnp.ones(DIM)}


def loss(params, ids):
    return jnp.sum(jnp.sin(params["table"][ids] @ params["w"]))


def trained(tx, loss=loss, **kwargs):
    params, step = start(), osa.make_train_step(loss, tx, **kwargs)
    state = jax.tree.map(jnp.copy, tx.init(params))  # lbfgs has one array twice
    for ids in IDS:
        params, state, _ = step(params, state, ids)
    return params


def numpy_sparse_adam():
    """SparseAdam of the table and of `w`, in float64."""
    of_table, of_w = (NumpyAdam(start()[name], RATE) for name in ("table", "w"))
    for ids in IDS:
        table, w = of_table.table, of_w.table
        slope = np.cos(table[ids] @ w)
        grad_of_w = slope @ table[ids]
        of_table.step(row_sums(slope[:, None] * w, ids[:, None], table.shape))
        of_w.step(grad_of_w)
    return {"table": of_table.table, "w": of_w.table}


class Slots:
    """A transformation that is no tuple, and has no `__dict__`."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def init(self, params):
        return self.inner.init(params)

    def update(self, grads, state, params=None):
        return self.inner.update(grads, state, params)


def labels(params):
    return {name: "table" if name == "table" else "rest" for name in params}


WRAPPERS = {
    "a global": optax.GradientTransformation(
        lambda p: INNER.init(p), lambda g, s, p=None: INNER.update(g, s, p)
    ),
    "inject_hyperparams of a function": optax.inject_hyperparams(
        lambda lr: osa.sparse_adam(lr)
    )(lr=RATE),
    "slots": Slots(INNER),
    "partition of slots": optax.partition(
        {"table": Slots(INNER), "rest": INNER}, labels
    ),
    "apply_if_finite": optax.apply_if_finite(INNER, 3),
    "conditionally_mask": optax.conditionally_mask(INNER, lambda step, **_: step >= 0),
    "conditionally_transform": optax.conditionally_transform(
        INNER, lambda step, **_: step >= 0
    ),
}


@pytest.mark.parametrize("name", slow_but(WRAPPERS, *list(WRAPPERS)[::2]))
def test_gradients_are_row_sparse(name):
    """Whatever the transformation is made of; SparseAdam in NumPy says the numbers."""
    params, expected = trained(WRAPPERS[name]), numpy_sparse_adam()
    for part, values in expected.items():
        assert_close(params[part], values, 1e-5, magnitude=1.0)
    untouched = np.setdiff1d(np.arange(ROWS), np.concatenate(IDS))
    assert_identical(params["table"][untouched], start()["table"][untouched])


@pytest.mark.slow
@pytest.mark.parametrize("is_finite", slow_but([True, False], True))
def test_apply_if_finite(is_finite):
    def scaled(params, ids, factor):
        return loss(params, ids) * factor

    tx = optax.apply_if_finite(osa.exact_adam(RATE), 3)
    step, params = osa.make_train_step(scaled, tx), start()
    params, state, _ = step(params, tx.init(params), IDS[0], 1 if is_finite else np.nan)
    params, _ = osa.flush(params, state)
    changed = np.flatnonzero(np.any(params["table"] != start()["table"], axis=1))
    assert changed.tolist() == ([3, 7] if is_finite else [])


PARTS = [(name, way) for name in OPTIMIZERS for way in ("plain", "kernel")]


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(
        PARTS,
        ("lazy", "plain"),
        ("exact_adamw", "kernel"),
    ),
    indirect=["backend"],
)
def test_step_is_that_of_its_parts(name, backend):
    """Bit for bit, though the kernel adds updates to the tables itself."""
    tx = OPTIMIZERS[name].make(RATE)

    def both(params, ids):
        bags = osa.embedding_bag(params["bags"], ids[None])
        return loss(params, ids) + jnp.sum(jnp.sin(bags @ params["w"]))

    step = osa.make_train_step(both, tx)

    @jax.jit
    def parts(params, state, ids):
        read = {"read": state} if "exact" in name else {}
        value, grads = osa.value_and_grad(both, **read)(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state, value

    params = start() | {"bags": start()["table"]}
    found = expected = params, tx.init(params)
    adds = step.lower(*found, IDS[0]).as_text().count("adds = true")
    assert adds == 2 * (backend == "kernel" and name in IN_KERNEL)
    for ids in IDS:
        expected = parts(*expected[:2], ids)
        found = step(*jax.tree.map(jnp.copy, found[:2]), ids)
        assert_identical(found, expected)


def test_wrapper_that_passes_other_parameters():
    def update(grads, state, params=None, **extra):
        moved = jax.tree.map(lambda x: x + 1, params)
        return INNER.update(grads, state, moved, **extra)

    moves = optax.GradientTransformationExtraArgs(INNER.init, update)
    assert_identical(trained(moves), trained(INNER))


def test_parameters_of_another_shape(backend):
    params = start() | {"table": jnp.ones((ROWS + 1, DIM))}
    with pytest.raises(ValueError, match="shape"):
        osa.make_train_step(loss, INNER)(params, INNER.init(start()), IDS[0])


def test_state_that_keeps_updates(backend):
    def update(grads, state, params=None, **extra):
        updates, inner = INNER.update(grads, state[0], params, **extra)
        return updates, (inner, updates)

    keeps = optax.GradientTransformationExtraArgs(
        lambda params: (INNER.init(params), ()), update
    )
    assert_identical(trained(keeps), trained(INNER))


DENSE = {
    "adam": optax.adam(RATE),
    "sgd": optax.sgd(RATE),
    "momentum": optax.sgd(RATE, momentum=0.9),
    "a schedule": optax.sgd(optax.linear_schedule(RATE, 0.0, 10)),
    "sign and clip": optax.chain(optax.clip(0.1), optax.scale(-1)),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
    "lion": optax.lion(RATE),
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
    "lbfgs": optax.lbfgs(),
    "MultiSteps": optax.MultiSteps(osa.lazy(optax.adam(RATE)), 2),
    "scaled behind": optax.chain(INNER, optax.scale(0.5)),
    # Arithmetic of indices, too: the program would make NaN.
    "negated behind": optax.chain(INNER, optax.scale(-1)),
    "signs behind": optax.chain(INNER, optax.scale_by_sign()),
    "negated in a partition": optax.partition(
        {"table": optax.chain(INNER, optax.scale(-1)), "rest": INNER}, labels
    ),
    "clip before": optax.chain(optax.clip_by_global_norm(1.0), INNER),
    "labels by function": optax.partition(
        {"all": INNER}, lambda tree: jax.tree.map(lambda _: "all", tree)
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_takes_dense_gradients_only(name):
    """What it raises is raised, with a note that says what to do."""
    words = r"lazy\(optax.adam.* make_train_step gives .* exact_adam.* sparse=False"
    with pytest.raises((TypeError, ValueError), match=words):
        trained(DENSE[name])


@pytest.mark.parametrize("name", slow_but(["adam", "lbfgs"], "adam"))
def test_dense_gradients(name):
    """As `jax.value_and_grad` and optax's own functions do it."""
    tx, params = DENSE[name], start()
    state = tx.init(params)
    for ids in IDS:

        def of_params(params, ids=ids, **_):
            return loss(params, ids)

        value, grads = jax.value_and_grad(of_params)(params)
        extra = {"value": value, "grad": grads, "value_fn": of_params}
        tx = optax.with_extra_args_support(tx)
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    for name, found in trained(tx, sparse=False).items():
        assert_close(found, params[name], 1e-5, magnitude=1.0)


@pytest.mark.slow
def test_a_model_without_tables():
    def quadratic(params, ids):
        return jnp.sum((params["w"] - 2) ** 2) + jnp.sum(params["table"] ** 2)

    params = trained(optax.lbfgs(), quadratic)
    assert_close(params["w"], 2 * np.ones(DIM), 1e-5, magnitude=1.0)


# One table that stays as it is, in the words of docs/frozen_rows.md.
FROZEN = {
    "partition": optax.partition(
        {"rest": INNER, "frozen": optax.set_to_zero()},
        {"table": "rest", "w": "rest", "other": "frozen"},
    ),
    "selective_transform": optax.transforms.selective_transform(
        INNER, freeze_mask={"table": False, "w": False, "other": True}
    ),
}


def test_what_leaves_indices_as_they_are():
    """By operators of BCOO, by zeros, and by what chooses between both."""

    def update(grads, state, params=None):
        is_bcoo = {"is_leaf": lambda x: hasattr(x, "todense")}
        return jax.tree.map(lambda g: -RATE * g, grads, **is_bcoo), state

    sgd = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
    params, expected, gradient = trained(sgd), start(), jax.jit(jax.grad(loss))
    for ids in IDS:
        grads = gradient(expected, ids)
        expected = jax.tree.map(lambda p, g: p - RATE * g, expected, grads)
    for name, found in params.items():
        assert_close(found, expected[name], 1e-5, magnitude=1.0)
    assert_identical(trained(optax.set_to_zero())["table"], start()["table"])
    found = trained(optax.chain(sgd, optax.zero_nans()))
    assert_identical(found, params)


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_table(name, backend):
    """All others are trained as if it were a constant."""
    other = 2 * start()["table"]

    def of_both(params, other, ids):
        rows = params["table"][ids] + other[ids]
        return jnp.sum(jnp.sin(rows @ params["w"]))

    tx, frozen = FROZEN[name], start() | {"other": jnp.copy(other)}
    state, expected = tx.init(frozen), start()
    expected_state = INNER.init(expected)
    step = osa.make_train_step(lambda p, ids: of_both(p, p["other"], ids), tx)
    alone = osa.make_train_step(of_both, INNER)
    for ids in IDS:
        frozen, state, _ = step(frozen, state, ids)
        args = expected, expected_state, other, ids
        expected, expected_state, _ = alone(*args)
    assert_identical(frozen.pop("other"), 2 * start()["table"])
    for part, found in frozen.items():
        assert_close(found, expected[part], 1e-6, magnitude=1.0)


def test_errors_of_the_loss_and_of_the_optimizer_are_their_own():
    def fails(params, ids):
        raise RuntimeError("of the loss")

    def update(grads, state, params=None):
        raise KeyError("of the optimizer")

    with pytest.raises(RuntimeError, match="of the loss"):
        trained(optax.adam(RATE), fails)
    with pytest.raises(KeyError, match="of the optimizer"):
        trained(optax.GradientTransformation(INNER.init, update))


# Keywords.


def with_keywords(params, ids, *, train=False, scale=1.0):
    value = loss(params, ids) * scale
    return value + 100 if train else value


def takes_factor():
    def update(grads, state, params=None, *, factor=1.0, **_):
        updates, state = INNER.update(grads, state, params)
        return {"table": updates["table"] * factor, "w": updates["w"]}, state

    return optax.GradientTransformationExtraArgs(INNER.init, update)


def named_as_arguments(weights, ids, params=1.0, state=1.0, batch=1.0, keywords=1.0):
    return loss(weights, ids) * params * state * batch * keywords


KEYWORDS = [
    (with_keywords, {"train": True}),
    (with_keywords, {"train": False}),
    (with_keywords, {"scale": 3.0}),
    (with_keywords, {"ids": IDS[0]}),
    (named_as_arguments, {"params": 2.0, "state": 3.0, "batch": 5.0, "keywords": 7.0}),
]


@pytest.mark.parametrize(("loss", "kwargs"), KEYWORDS)
def test_keywords_of_the_loss(loss, kwargs):
    batch = () if "ids" in kwargs else IDS[:1]
    step = osa.make_train_step(loss, INNER)
    _, _, value = step(start(), INNER.init(start()), *batch, **kwargs)
    assert_close(value, loss(start(), *batch, **kwargs), 1e-5)


def test_keywords_of_the_optimizer():
    tx = takes_factor()
    step = osa.make_train_step(with_keywords, tx)
    params, _, _ = step(start(), tx.init(start()), IDS[0], factor=2.0, scale=1.0)
    moved = (params["table"] - start()["table"])[3]
    assert_close(abs(moved), np.full(DIM, 2 * RATE), 1e-4)
    chain = optax.chain(optax.identity(), tx)  # which names no keyword
    step = osa.make_train_step(loss, chain)
    params, _, _ = step(start(), chain.init(start()), IDS[0], factor=2.0)
    assert_close((params["table"] - start()["table"])[3], moved, 1e-6)


@pytest.mark.parametrize(
    "tx",
    [INNER, optax.chain(INNER), Slots(INNER), osa.lazy(optax.adam(RATE))],
    ids=["sparse_adam", "chain", "slots", "lazy"],
)
def test_keywords_of_nobody(tx):
    step = osa.make_train_step(with_keywords, tx)
    with pytest.raises(TypeError, match="`trian`, which neither"):
        step(start(), tx.init(start()), IDS[0], trian=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [INNER, Slots(INNER), osa.lazy(optax.adam(RATE))],
    ids=["rows", "slots", "lazy"],
)
def test_keywords_of_nobody_without_jit(tx):
    step = osa.make_train_step(loss, tx)
    with jax.disable_jit():
        state = tx.init(start())
        with pytest.raises(TypeError, match="`trian`, which neither"):
            step(start(), state, IDS[0], trian=True)
        step(start(), state, IDS[0])


def test_usual_steps_are_traced_once():
    calls = []

    def update(grads, state, params=None):
        calls.append(0)
        return INNER.update(grads, state, params)

    trained(optax.GradientTransformation(INNER.init, update))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["rowwise_adam", "exact_adam"])
def test_an_optimizer_of_rows_says_what_is_wrong(name):
    """It is not said to take dense gradients only, as one of optax would be."""
    tx, table = getattr(osa, name)(RATE), start()["table"]
    step = osa.make_train_step(lambda t, i, j: jnp.sum(t[i, j] ** 2), tx)
    with pytest.raises(ValueError, match="Look whole rows up"):
        step(table, tx.init(table), IDS[0], np.array([0, 1, 0]))
