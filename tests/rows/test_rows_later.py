"""Rows put back some steps later, and two batches of rows that are taken at once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_sparse_adam as osa

from ..helpers.support import need_devices, slow_but

IDS = {"table": np.array([3, 4]), "w": None}
STEPS, TAKEN, BACK = 14, 3, 8


def labels(params):
    return {name: name for name in params}


LAZY = {
    "sparse_adam": lambda: osa.sparse_adam(0.1),
    "rowwise_adam": lambda: osa.rowwise_adam(0.1),
    "lazy": lambda: osa.lazy(optax.adam(0.1)),
    "per_row": lambda: osa.lazy(osa.per_row(optax.adam(0.1))),
    "inject": lambda: optax.inject_hyperparams(
        osa.sparse_adam, static_args=("b1", "b2")
    )(optax.linear_schedule(0.1, 0.01, 20)),
    "partition": lambda: optax.partition(
        {"table": osa.sparse_adam(0.1), "w": optax.adam(0.1)}, labels
    ),
    "chain": lambda: optax.chain(
        osa.lazy(optax.clip(1.0)), osa.sparse_adam(optax.linear_schedule(0.1, 0, 20))
    ),
}
EXACT = {
    "exact_adam": lambda: osa.exact_adam(lambda count: 0.1 - 0.004 * count),
    "exact_adamw": lambda: osa.exact_adamw(0.1, weight_decay=0.2),
}


@pytest.fixture(autouse=True)
def _as_optax_expects(as_optax_expects):
    """Its transformations promote weak types."""


def begin(tx, kind="jax", dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {"table": rng.standard_normal((12, 2)), "w": np.ones(3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    state = tx.init(params)
    return stored((params, state), kind)


def stored(trees, kind):
    convert = np.array if kind == "numpy" else jnp.asarray
    return jax.tree.map(convert, trees)


def loss(params, ids, goal):
    """Of each row apart, so that who lies in another place changes no other row."""
    rows = jnp.sum(jnp.sin(params["table"][ids] - goal))
    return rows + jnp.sum((params["w"] - goal) ** 2)


def batches(uses):
    """Ids and goal of each step; `uses(step)` says whether rows 3 and 4 are in it."""
    for number in range(STEPS):
        others = [(5 + number) % 12 if (5 + number) % 12 > 4 else 7, 9]
        ids = [3, 4, *others] if uses(number) else [6, 10, *others]
        yield np.array(ids), np.float32(0.1 * number)


def rests(number):
    """The steps in which rows 3 and 4 are in a batch: not while they are away."""
    return number < TAKEN or (number > BACK and number % 2 == 0)


def put(tx, kind, *args):
    function = functools.partial(osa.put_rows, tx)
    return (jax.jit(function) if kind == "jit" else function)(*args)


def train_with_a_journey(tx, kind, places=IDS, dtype=np.float32):
    """Rows 3 and 4 are away from step 3 to step 8, and others in their places."""
    step = osa.make_train_step(loss, tx)
    whole = begin(tx, kind, dtype)
    for number, (ids, goal) in enumerate(batches(rests)):
        if number == TAKEN:
            away = osa.take_rows(tx, *whole, IDS)
            away = jax.tree.map(np.asarray, away) if kind == "numpy" else away
            news = {"table": np.ones((2, 2), dtype), "w": None}
            whole = osa.reset_rows(tx, *whole, IDS, news)
        if number == BACK:
            whole = put(tx, kind, *whole, places, *away)
        if TAKEN <= number < BACK:  # somebody else lives there meanwhile
            ids = np.array([3, 4, *ids[2:]])
        if number > BACK:
            moved = dict(
                zip(IDS["table"].tolist(), places["table"].tolist(), strict=True)
            )
            ids = np.array([moved.get(i, i) for i in ids.tolist()])
        *whole, _ = step(*stored(whole, "jax"), ids, goal)
        whole = stored(whole, kind)
    return whole


# Each optimiser with rows on the host, and with those of a program or outside.
IN_PROGRAMS = list(zip(LAZY, ("jit", "jax") * len(LAZY), strict=False))
ON_HOST = [(name, "numpy") for name in LAZY]


@pytest.mark.parametrize(
    ("name", "kind"), slow_but(IN_PROGRAMS + ON_HOST, IN_PROGRAMS[0])
)
def test_a_row_that_was_away_has_rested(name, kind):
    """Beside a run in which it lay in the table, untouched: rows, state, count, `w`."""
    tx = LAZY[name]()
    step = osa.make_train_step(loss, tx)
    expected = begin(tx)
    for ids, goal in batches(rests):
        *expected, _ = step(*expected, ids, goal)
    found = train_with_a_journey(tx, kind)
    found = tuple(found)
    assert jax.tree.structure(found) == jax.tree.structure(tuple(expected))

    def check(path, x, y):  # all rows but those of others, who lived in no other run
        rows = [3, 4, 5, 7, 8, 9, 11] if np.shape(x)[:1] == (12,) else ...
        x, y = np.asarray(x)[rows], np.asarray(y)[rows]
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, found, tuple(expected))


class DenseAdam:
    """`optax.adamw` in NumPy's float64; the rate is a function of the count."""

    def __init__(self, table, rate, decay):
        self.table, self.rate, self.decay = np.array(table, np.float64), rate, decay
        self.mu, self.nu, self.count = np.zeros_like(table), np.zeros_like(table), 0

    def step(self, ids, goal):
        grad = np.zeros_like(self.table)
        for i in ids:
            grad[i] += np.cos(self.table[i] - goal)
        rate = self.rate(self.count)
        self.count += 1
        self.mu += (1 - 0.9) * (grad - self.mu)
        self.nu += (1 - 0.999) * (grad**2 - self.nu)
        root = np.sqrt(self.nu / (1 - 0.999**self.count)) + 1e-8
        update = self.mu / (1 - 0.9**self.count) / root + self.decay * self.table
        self.table -= rate * update


# Each optimiser with each kind of rows, at both places.
DATES = [
    (name, ([1, 0], [3, 4])[(number + other) % 2], kind)
    for number, name in enumerate(("exact_adamw", "exact_adam"))
    for other, kind in enumerate(("numpy", "jit", "jax"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "places", "kind"), slow_but(DATES, DATES[0]))
@jax.enable_x64(True)
def test_dates_of_stale_rows_are_absolute(name, places, kind):
    """A row that is away goes on with its momentum and decay, as in dense Adam."""
    tx = EXACT[name]()
    (start, _) = begin(tx, dtype=np.float64)
    is_decayed = name == "exact_adamw"
    rate = (lambda n: 0.1) if is_decayed else (lambda n: 0.1 - 0.004 * n)
    dense = DenseAdam(start["table"], rate, 0.2 if is_decayed else 0.0)
    for ids, goal in batches(rests):
        dense.step(ids, float(goal))
    params, state = train_with_a_journey(
        tx, kind, {"table": np.array(places), "w": None}, np.float64
    )
    assert int(state.count) == int(state.clock) == STEPS
    values, _ = osa.flush(params, state)
    table = np.asarray(values["table"])
    np.testing.assert_allclose(table[places], dense.table[[3, 4]], rtol=1e-9)
    np.testing.assert_allclose(
        table[[5, 7, 8, 9, 11]], dense.table[[5, 7, 8, 9, 11]], 1e-9
    )


@pytest.mark.parametrize(
    ("name", "kind"), slow_but(IN_PROGRAMS + ON_HOST, ("partition", "numpy"))
)
def test_a_later_step_moves_the_count_on(name, kind):
    """What the page teaches: take, step, put; with several steps between, too."""
    tx = LAZY[name]()
    step = osa.make_train_step(loss, tx)
    whole = begin(tx, kind)
    expected = stored(jax.tree.map(jnp.copy, whole), "jax")
    for number in range(3):
        rows = osa.take_rows(tx, *whole, IDS)
        for _ in range(number):
            goal = np.float32(number)
            *rows, _ = step(*rows, np.array([0, 1]), goal)
            *expected, _ = step(*expected, np.array([3, 4]), goal)
        whole = put(tx, kind, *whole, IDS, *rows)

    def check(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-6)

    jax.tree.map(check, tuple(whole), tuple(expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["jax", "jit"], "jit"))
def test_random_keys(kind):
    """The key of the later step, as all that rows share."""
    tx = osa.lazy(osa.stochastic_rounding(optax.adam(0.1), 0))
    step = osa.make_train_step(loss, tx)
    early = begin(tx)
    rows = osa.take_rows(tx, *early, IDS)
    *late, _ = step(*early, np.array([5, 6]), np.float32(1))
    _, state = put(tx, kind, *late, IDS, *rows)
    key = jax.random.key_data(late[1].key)
    np.testing.assert_array_equal(jax.random.key_data(state.key), key)
    rows = osa.take_rows(tx, *begin(tx), IDS)
    *rows, _ = step(*rows, np.array([0, 1]), np.float32(1))
    _, state = put(tx, kind, *begin(tx), IDS, *rows)
    np.testing.assert_array_equal(jax.random.key_data(state.key), key)


WRAPPED = {  # of what counts up and begins again, beside what counts up
    "finite": lambda: osa.lazy(optax.apply_if_finite(optax.adam(0.1), 5)),
    "finite sgd": lambda: osa.lazy(optax.apply_if_finite(optax.sgd(0.1), 5)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_counts_that_begin_again(name):
    """A step without an error ends a run of errors, and is a later one all the same."""
    tx = WRAPPED[name]()
    step = osa.make_train_step(loss, tx, sparse=False)
    whole = begin(tx)
    *whole, _ = step(*whole, np.array([3, 4]), np.float32(np.nan))
    rows = osa.take_rows(tx, *whole, IDS)
    *rows, _ = step(*rows, np.array([0, 1]), np.float32(0.5))
    w = np.asarray(rows[0]["w"])
    params, state = osa.put_rows(tx, *whole, IDS, *rows)
    np.testing.assert_array_equal(params["w"], w)
    counts = [x for x in jax.tree.leaves(state) if np.shape(x) == ()]
    assert 0 in np.array(counts, float)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint32", "uint8", "int8", "float32"])
def test_counts_of_other_types(dtype):
    """A state of a user's own, whose momentum counts nothing."""
    inner = osa.lazy(optax.trace(0.9))

    def init(params):
        return {"steps": jnp.zeros([], dtype), "inner": inner.init(params)}

    def update(grads, state, params=None):
        updates, new = inner.update(grads, state["inner"], params)
        return updates, {"steps": state["steps"] + jnp.ones([], dtype), "inner": new}

    tx = optax.GradientTransformation(init, update)
    step = osa.make_train_step(loss, tx)
    early = osa.take_rows(tx, *begin(tx), IDS)
    *late, _ = step(*begin(tx), np.array([5, 6]), np.float32(1))
    w = np.asarray(late[0]["w"])
    params, state = osa.put_rows(tx, *late, IDS, *early)
    assert int(state["steps"]) == 1
    np.testing.assert_array_equal(params["w"], w)
    *later, _ = step(*osa.take_rows(tx, params, state, IDS), np.array([0]), 2.0)
    w = np.asarray(later[0]["w"])
    params, state = osa.put_rows(tx, params, state, IDS, *later)
    assert int(state["steps"]) == 2
    np.testing.assert_array_equal(params["w"], w)


NAMED = LAZY | EXACT | {"momentum": lambda: osa.lazy(optax.sgd(0.1, momentum=0.9))}
NAMED |= {"adafactor": lambda: osa.sparse_adafactor(0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in NAMED if x != "partition"])
def test_parameters_with_names_of_counts(name):
    """Their moments, which fall, are none; nor is a parameter itself."""
    names, tx = ("t", "step", "count"), NAMED[name]()

    def named_loss(params, ids, goal):
        scale = params["t"] * params["step"] * params["count"]
        return loss(params, ids, goal) * (1 + scale) + jnp.sum(scale)

    step = osa.make_train_step(named_loss, tx)
    params = {**begin(tx)[0], **{x: jnp.float32(1) for x in names}}
    where = {**dict.fromkeys(params), "table": IDS["table"]}
    whole = params, tx.init(params)
    expected = jax.tree.map(jnp.copy, whole)
    for number in range(4):
        goal = np.float32(number - 2)
        rows = osa.take_rows(tx, *whole, where)
        *rows, _ = step(*rows, np.array([0, 1]), goal)
        whole = osa.put_rows(tx, *whole, where, *rows)
        *expected, _ = step(*expected, np.array([3, 4]), goal)
    for x in ("w", *names):
        np.testing.assert_allclose(whole[0][x], expected[0][x], rtol=1e-5, err_msg=x)
    away = osa.take_rows(tx, *whole, where)
    for _ in range(3):
        *whole, _ = step(*whole, np.array([7, 9]), np.float32(3))
    kept = {x: np.asarray(whole[0][x]) for x in ("w", *names)}
    params, _ = osa.put_rows(tx, *whole, where, *away)
    if name != "momentum":  # which counts nothing
        for x, value in kept.items():
            np.testing.assert_array_equal(params[x], value)


@pytest.mark.parametrize("table", ["table", "t", "steps"])
def test_a_table_with_the_name_of_a_count(table):
    """Of `optax.novograd` it has one scalar, which falls."""
    tx, ids = osa.lazy(optax.novograd(1e-2)), jnp.arange(4)

    def named_loss(params, goal):
        return jnp.mean((params[table][ids] @ params["w"] - goal) ** 2)

    step = osa.make_train_step(named_loss, tx)
    params = {table: jnp.linspace(0, 1, 24).reshape(8, 3), "w": jnp.ones(3)}
    whole = params, tx.init(params)
    *whole, _ = step(*whole, 40.0)
    where = {table: jnp.array([6, 7]), "w": None}
    away = osa.take_rows(tx, *whole, where)
    for _ in range(3):
        *whole, _ = step(*whole, 0.1)
    count, w = int(optax.tree.get(whole[1], "count")), np.asarray(whole[0]["w"])
    params, state = osa.put_rows(tx, *whole, where, *away)
    assert int(optax.tree.get(state, "count")) == count == 4
    np.testing.assert_array_equal(params["w"], w)


PARTS = {0: optax.adam(0.1), 2: optax.adam(0.1)}
OF_SCALARS = {
    "per_row": LAZY["per_row"],
    "by ndim": lambda: osa.lazy(
        optax.partition(PARTS, lambda params: jax.tree.map(jnp.ndim, params))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SCALARS)
def test_the_count_that_a_scalar_has_of_its_own(name):
    """Where there is no other count of what is left whole, or one for each."""
    tx = OF_SCALARS[name]()

    def of_bias(params, ids, goal):
        rows = jnp.sum(jnp.sin(params["table"][ids] - goal))
        return rows + (params["bias"] - goal) ** 2

    step = osa.make_train_step(of_bias, tx)
    table = begin(osa.sparse_adam(0.1))[0]["table"]
    params = {"table": table, "bias": jnp.float32(0)}
    whole, where = (params, tx.init(params)), {"table": IDS["table"], "bias": None}
    *whole, _ = step(*whole, np.array([3, 4]), np.float32(1))
    rows = osa.take_rows(tx, *whole, where)
    for number in range(3):
        *whole, _ = step(*whole, np.array([7, 9]), np.float32(number))
    bias = np.asarray(whole[0]["bias"])
    params, state = osa.put_rows(tx, *whole, where, *rows)
    counts = [x for x in jax.tree.leaves(state) if x.dtype == np.int32 and not x.ndim]
    assert {*map(int, counts)} == {4}
    np.testing.assert_array_equal(params["bias"], bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse_adam", "exact_adam"])
def test_an_integer_that_is_no_count(name):
    """How many rows a step has touched, which a wrapper keeps for a log."""
    inner = (LAZY | EXACT)[name]()

    def init(params):
        return {"inner": inner.init(params), "touched": jnp.int32(0)}

    def update(grads, state, params=None):
        updates, new = inner.update(grads, state["inner"], params)
        touched = osa.gradient_stats(grads)["table"].touched
        return updates, {"inner": new, "touched": touched}

    tx = optax.GradientTransformation(init, update)
    step = osa.make_train_step(loss, tx)
    *whole, _ = step(*begin(tx), np.arange(9), np.float32(1))
    rows = osa.take_rows(tx, *whole, IDS)
    for number in range(3):
        *whole, _ = step(*whole, np.array([9, 10]), np.float32(number))
    w = np.asarray(whole[0]["w"])
    params, state = osa.put_rows(tx, *whole, IDS, *rows)
    assert (int(state["inner"].count), int(state["touched"])) == (4, 2)
    np.testing.assert_array_equal(params["w"], w)


@pytest.mark.parametrize(
    ("has_dense", "is_jitted"),
    slow_but(itertools.product([True, False], [True, False]), (True, False)),
)
def test_rows_of_another_table_have_begun_again(has_dense, is_jitted):
    """Their counts are smaller than they were, and the tables are of a later step."""

    def loss(params, users, items):
        w = params["w"] if has_dense else jnp.ones(2)
        return jnp.sum((params["users"][users] * params["items"][items]) @ w)

    def only(name, x):
        return dict.fromkeys(params) | {name: x}

    tx = osa.lazy(osa.per_row(optax.adam(0.1)))
    params = {"users": jnp.ones((6, 2)), "items": jnp.ones((6, 2))}
    params |= {"w": jnp.ones(2)} if has_dense else {}
    state, step = tx.init(params), osa.make_train_step(loss, tx)
    params, state, _ = step(params, state, np.array([3]), np.array([1]))
    away = osa.take_rows(tx, params, state, only("users", np.array([3])))
    for _ in range(5):
        params, state, _ = step(params, state, np.array([2]), np.array([4]))
    ids, new = only("items", np.array([1])), only("items", np.zeros((1, 2), "f"))
    params, state = osa.reset_rows(tx, params, state, ids, new)
    before = jax.tree.map(np.array, (params, state))
    put = functools.partial(osa.put_rows, tx)
    put = jax.jit(put) if is_jitted else put
    after = put(params, state, only("users", np.array([5])), *away)
    np.testing.assert_array_equal(after[0]["users"][5], away[0]["users"][0])

    def check(path, x, y):
        rows = slice(5) if "users" in jax.tree_util.keystr(path) else ...
        np.testing.assert_array_equal(np.asarray(x)[rows], y[rows], str(path))

    jax.tree_util.tree_map_with_path(check, after, before)


def test_what_is_whole_may_be_left_out():
    tx = osa.lazy(optax.trace(0.9))  # which counts nothing
    params, state = begin(tx)
    rows, row_state = osa.take_rows(tx, params, state, IDS)
    rows = jax.tree.map(lambda x: x + 1, rows)
    new, _ = osa.put_rows(tx, params, state, IDS, rows, row_state)
    np.testing.assert_array_equal(new["w"], params["w"] + 1)
    new, _ = osa.put_rows(tx, params, state, IDS, rows | {"w": None}, row_state)
    np.testing.assert_array_equal(new["w"], params["w"])
    np.testing.assert_array_equal(new["table"][3], params["table"][3] + 1)


def flushed_rows(tx, params, state):
    rows = osa.take_rows(tx, params, state, IDS)
    return (params, state), osa.flush(*rows)


def flushed_table(tx, params, state):
    rows = osa.take_rows(tx, params, state, IDS)
    return osa.flush(params, state), rows


def dense_step(tx, params, state):
    rows = osa.take_rows(tx, *osa.flush(params, state), IDS)
    step = osa.make_train_step(loss, tx, sparse=False)
    *rows, _ = step(*rows, np.array([0, 1]), np.float32(1))
    return (params, state), rows


def other_rows(tx, params, state):
    params, state = osa.flush(params, state)
    step = osa.make_train_step(loss, tx)
    *other, _ = step(*begin(tx), np.array([3, 4]), np.float32(1))
    return (params, state), osa.take_rows(tx, *other, IDS)


def handed_over(tx, params, state):
    """Of dense Adam: moments at clock 0."""
    params, state = osa.flush(params, state)
    kept = {"count": state.count, "mu": state.mu, "nu": state.nu}
    return params, tx.init(params)._replace(**kept)


def stepped_and_flushed(tx, params, state):
    step = osa.make_train_step(loss, tx)
    *whole, _ = step(*jax.tree.map(jnp.copy, (params, state)), IDS["table"] % 2, 1.0)
    return osa.flush(*whole)


def rows_of_a_run_handed_over(tx, params, state):
    whole = handed_over(tx, params, state)
    rows = osa.take_rows(tx, *whole, IDS)
    return stepped_and_flushed(tx, *whole), rows


def flushed_rows_of_a_run_handed_over(tx, params, state):
    whole = handed_over(tx, params, state)
    return whole, stepped_and_flushed(tx, *osa.take_rows(tx, *whole, IDS))


WAYS = (
    *(flushed_rows, flushed_table, dense_step, other_rows),
    *(rows_of_a_run_handed_over, flushed_rows_of_a_run_handed_over),
)
# Each way with each kind of rows, and with both optimisers.
BETWEEN = [
    (way, list(EXACT)[(number + other) % 2], kind)
    for number, way in enumerate(WAYS)
    for other, kind in enumerate(("jit", "jax", "numpy"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name", "kind"), slow_but(BETWEEN, BETWEEN[0]))
def test_a_flush_between(way, name, kind):
    """What is stored of a row means another number: refused, or NaN in a program."""
    tx = EXACT[name]()
    step = osa.make_train_step(loss, tx)
    whole = begin(tx)
    for ids, goal in batches(lambda number: True):
        *whole, _ = step(*whole, ids, goal)
    whole, rows = (stored(x, kind) for x in way(tx, *whole))
    if kind != "jit":
        with pytest.raises(ValueError, match="since the last flush"):
            put(tx, kind, *whole, IDS, *rows)
        return
    params, state = put(tx, kind, *whole, IDS, *rows)
    assert np.isnan(params["table"][np.array([3, 4])]).all()
    np.testing.assert_array_equal(params["table"][5:], whole[0]["table"][5:])
    # What is stored of other rows means what it meant.
    new, old = (osa.flush(*x)[0]["table"][5:] for x in ((params, state), whole))
    np.testing.assert_array_equal(new, old)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_warm_restart_between(name):
    """Its count is smaller than that of the rows, which are older by the clock."""
    tx = EXACT[name]()
    step = osa.make_train_step(loss, tx)
    whole = begin(tx)
    for number in range(5):
        *whole, _ = step(*whole, np.array([3, 4]), np.float32(number))
    whole = osa.flush(*whole)
    rows = osa.take_rows(tx, *whole, IDS)
    params, state = whole[0], optax.tree.set(whole[1], count=jnp.int32(0))
    for number in range(3):
        batch = np.array([7, 9]), np.float32(number)
        params, state, _ = step(params, state, *batch)
    expected = jax.tree.map(jnp.copy, (params, state))
    params, state = osa.put_rows(tx, params, state, IDS, *rows)
    for new, old in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(new, old)  # nobody has changed these rows


def multi_steps(**options):
    """Of the dense parameter: it accumulates the gradients of four batches."""
    steps = optax.MultiSteps(optax.adam(0.1), 4, **options)
    parts = {"t": osa.lazy(optax.adagrad(0.1)), "w": steps.gradient_transformation()}
    return optax.partition(parts, {"table": "t", "w": "w"})


@pytest.mark.slow
@pytest.mark.parametrize("later", ["tables", "rows"])
def test_within_one_accumulation(later):
    """What is accumulated of the dense parameter is that of the later ones."""
    tx = multi_steps(should_skip_update_fn=optax.skip_not_finite)
    step = osa.make_train_step(loss, tx)
    # A batch that is skipped leaves a number behind that is smaller after the next one.
    *whole, _ = step(*begin(tx), np.array([7, 9]), np.float32(np.nan))
    rows = osa.take_rows(tx, *whole, IDS)
    if later == "rows":
        *rows, _ = step(*rows, np.array([0, 1]), np.float32(0.5))
    else:
        for number in range(2):
            *whole, _ = step(*whole, np.array([7, 9]), np.float32(number))
    kept = jax.tree.map(np.array, rows if later == "rows" else whole)
    params, state = osa.put_rows(tx, *whole, IDS, *rows)
    of_w = [x[1].inner_states["w"] for x in ((params, state), kept)]
    jax.tree.map(np.testing.assert_array_equal, *of_w)
    assert np.any(of_w[0].inner_state.acc_grads["w"])
    np.testing.assert_array_equal(params["w"], kept[0]["w"])


@pytest.mark.slow
def test_another_table_where_a_named_count_stands_still():
    """MultiSteps has skipped batches: the counts of `per_row` of that table tell."""
    skip = functools.partial(optax.skip_large_updates, max_squared_norm=4.0)
    of_w = optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=skip)
    of_tables = osa.lazy(osa.per_row(optax.adam(0.1)))
    parts = {"t": of_tables, "w": of_w.gradient_transformation()}
    tx = optax.partition(parts, {"a": "t", "b": "t", "w": "w"})

    def loss(params, ids, size):
        return jnp.sum(params["a"][ids] * params["b"][ids]) + size * params["w"].sum()

    step = osa.make_train_step(loss, tx)
    params = {"a": jnp.ones((6, 2)), "b": jnp.ones((6, 2)), "w": jnp.ones(2)}
    ids = {"a": np.array([3]), "b": None, "w": None}
    *whole, _ = step(params, tx.init(params), np.array([3, 4]), np.float32(0.1))
    rows = osa.take_rows(tx, *whole, ids)
    *whole, _ = step(*whole, np.array([1, 5]), np.float32(30))
    before = jax.tree.map(np.array, whole)
    params, state = osa.put_rows(tx, *whole, ids, *rows)
    jax.tree.map(np.testing.assert_array_equal, (params, state), tuple(before))


@pytest.mark.slow
def test_a_whole_table_inside_of_shard_map():
    """Whose counts differ from one device to the next: the clock decides."""
    need_devices(4)
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
    tx = osa.exact_adamw(0.05, weight_decay=0.2)
    params = {"a": jnp.ones((16, 2)), "b": jnp.ones((16, 2)), "w": jnp.ones(2)}

    def loss(params, ids):
        return jnp.sum(jnp.sin((params["a"][ids] * params["b"][ids]) @ params["w"]))

    step = osa.make_train_step(loss, tx)
    params, state, _ = step(params, tx.init(params), np.array([1, 5, 9]))

    def cloned(params, state, ids, places):
        parts = ({"a": x, "b": None, "w": None} for x in (ids, places))
        rows = osa.take_rows(tx, params, state, next(parts))
        return osa.put_rows(tx, params, state, next(parts), *rows)

    split, whole = PartitionSpec("x"), PartitionSpec()
    of_tree = jax.tree.map(
        lambda x: split if x.shape[:1] == (16,) else whole, (params, state)
    )
    on_each = jax.shard_map(
        cloned, mesh=mesh, in_specs=(*of_tree, split, split), out_specs=of_tree
    )
    # Row 1 of each device's four, to the place of its row 2.
    made = jax.jit(on_each)(params, state, np.full(4, 1), np.full(4, 2))
    places = 4 * np.arange(4)
    expected = cloned(params, state, places + 1, places + 2)
    jax.tree.map(np.testing.assert_array_equal, made, expected)


@pytest.mark.slow
def test_a_count_that_begins_again():
    """That of `apply_every`, beside that of Adam; of dense gradients."""
    tx = optax.chain(optax.adam(0.1), optax.apply_every(2))

    @jax.jit
    def step(params, state, ids, goal):
        updates, state = tx.update(jax.grad(loss)(params, ids, goal), state, params)
        return optax.apply_updates(params, updates), state

    whole = step(*begin(tx), np.array([3, 4]), np.float32(1))
    rows = osa.take_rows(tx, *whole, IDS)
    whole = step(*whole, np.array([7, 9]), np.float32(2))
    params, state = osa.put_rows(tx, *whole, IDS, *rows)
    assert state[0][0].count == 2
    np.testing.assert_array_equal(params["w"], whole[0]["w"])


@pytest.mark.slow
def test_first_rows_after_a_flush():
    """Of `init`: nothing has moved yet, so that nothing is to be brought up to date."""
    tx = EXACT["exact_adam"]()
    step = osa.make_train_step(loss, tx)
    rows = osa.take_rows(tx, *begin(tx), IDS)
    *whole, _ = step(*begin(tx), np.array([3, 4]), np.float32(1))
    whole = osa.put_rows(tx, *osa.flush(*whole), IDS, *rows)
    values, _ = osa.flush(*whole)
    np.testing.assert_array_equal(values["table"][3:5], rows[0]["table"])


# Each optimiser with rows on the host and on the device, in a program or outside.
TWICE = [("numpy", name) for name in LAZY | EXACT]
TWICE += list(zip(("jit", "jax") * len(TWICE), LAZY | EXACT, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), slow_but(TWICE, ("numpy", "sparse_adam"), ("jit", "sparse_adam"))
)
def test_two_batches_taken_before_a_step(kind, name):
    """A step donates what it is given: neither the other batch nor the originals."""
    tx = (LAZY | EXACT)[name]()
    step = osa.make_train_step(loss, tx)
    params, state = begin(tx)
    if kind == "numpy":  # tables on the host; what is whole on the device
        on_host = jax.tree.map(lambda x: np.array(x) if np.ndim(x) == 2 else x, state)
        params, state = params | {"table": np.array(params["table"])}, on_host
    take = functools.partial(osa.take_rows, tx)
    if kind == "jit":
        take = jax.jit(take)
    batch = {"table": np.array([7, 8]), "w": None}
    before = jax.tree.map(np.array, (params, state))
    a, b = take(params, state, IDS), take(params, state, batch)
    assert not {id(x) for x in jax.tree.leaves(a) if np.shape(x)} & {
        id(x) for x in jax.tree.leaves(b)
    }
    of_a, of_b = (step(*x, np.array([0, 1]), np.float32(1))[:2] for x in (a, b))
    jax.tree.map(np.testing.assert_array_equal, (params, state), before)
    one = osa.put_rows(tx, params, state, IDS, *of_a)
    two = osa.put_rows(tx, *one, batch, *of_b)
    ints = [x for x in jax.tree.leaves(two[1]) if x.dtype == np.int32]
    assert ints
    assert all(np.all((x <= 1) | (x == 10)) for x in ints)
    for rows, places in ((of_a, [3, 4]), (of_b, [7, 8])):
        np.testing.assert_array_equal(
            two[0]["table"][np.array(places)], rows[0]["table"]
        )
    # Twice put, and twice stepped on: neither takes the other's memory.
    three = osa.put_rows(tx, params, state, batch, *of_b)
    for whole in (two, three):
        step(*stored(whole, "jax"), np.array([3, 7]), np.float32(1))
    jax.tree.map(np.asarray, (of_a, of_b))


REPEATED = [[5, 3, 5, 12, 3, -1, 5], [3, 3, 5, 5, 5, 7, 12], [4, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("ids", slow_but(REPEATED, REPEATED[0]))
def test_ids_that_are_repeated_in_a_program(ids):
    """The last entry of a row is written: its values with its own moments, everywhere.

    Beside NumPy, whose assignments go from the first to the last.
    """
    tx = osa.sparse_adam(0.1)
    params = {"x": jnp.zeros((12, 2)), "y": jnp.zeros(12)}
    state, size = tx.init(params), len(ids)
    entry = np.arange(1.0, 1 + size, dtype=np.float32)
    rows = {"x": np.stack([entry, entry], 1), "y": entry}
    row_state = state._replace(mu=rows, nu=rows)
    expected = np.zeros(12)
    for i, value in zip(ids, entry, strict=True):
        if 0 <= i < 12:
            expected[i] = value
    put = jax.jit(functools.partial(osa.put_rows, tx))
    found, of_state = put(params, state, jnp.array(ids), rows, row_state)
    for tree in (found, of_state.mu, of_state.nu):
        np.testing.assert_array_equal(tree["y"], expected)
        np.testing.assert_array_equal(tree["x"], np.stack([expected, expected], 1))
    reset = jax.jit(functools.partial(osa.reset_rows, tx))
    again, cleared = reset(found, of_state, jnp.array(ids), rows)
    np.testing.assert_array_equal(again["y"], expected)
    assert not np.any(cleared.nu["x"])
    # A gradient has each of its rows once.
    dense = jnp.arange(12.0)
    grad = jax.jit(osa.rows_of)(dense, jnp.array(ids))
    inside = sorted({i for i in ids if 0 <= i < 12})
    np.testing.assert_array_equal(grad.todense(), np.where(expected != 0, dense, 0))
    assert sorted(i for i in grad.indices[:, 0].tolist() if i < 12) == inside


def test_a_transformation_without_a_hash():
    import dataclasses

    @dataclasses.dataclass
    class Own:
        init: object
        update: object

    tx = Own(*osa.sparse_adam(0.1))
    params, state = begin(tx)
    with pytest.raises(TypeError, match="unhashable"):
        hash(tx)
    for _ in range(2):
        taken = osa.take_rows(tx, params, state, IDS)
        params, state = osa.put_rows(tx, params, state, IDS, *taken)
        osa.reset_rows(tx, params, state, IDS, taken[0] | {"w": None})


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_each_mode_has_states_of_its_own(first):
    """Those of `exact_adam` have as many numbers as the mode has bits for."""
    tx = osa.exact_adam(0.1)
    for mode in (first, not first):
        with jax.enable_x64(mode):
            params, state = begin(tx)
            *rows, _ = osa.make_train_step(loss, tx)(
                *osa.take_rows(tx, params, state, IDS), np.array([0]), np.float32(1)
            )
            params, state = osa.put_rows(tx, params, state, IDS, *rows)
            assert int(state.count) == 1


@pytest.mark.parametrize("verb", ["reset", "older", "later"])
@pytest.mark.parametrize("name", slow_but(EXACT | LAZY, "sparse_adam", "exact_adam"))
def test_a_step_after_a_verb_leaves_what_was_before_it(verb, name):
    """It donates its arguments, and whole leaves of these are copies, too."""
    tx = (EXACT | LAZY)[name]()
    step = osa.make_train_step(loss, tx)
    *whole, _ = step(*begin(tx), np.array([3, 4]), np.float32(1))
    rows = osa.take_rows(tx, *whole, IDS)
    if verb == "older":
        *whole, _ = step(*whole, np.array([3, 4]), np.float32(1))
    elif verb == "later":
        *rows, _ = step(*rows, np.array([0]), np.float32(1))
    before = jax.tree.map(np.array, whole)
    if verb == "reset":
        new = osa.reset_rows(tx, *whole, IDS, rows[0])
    else:
        new = osa.put_rows(tx, *whole, IDS, *rows)
    step(*new, np.array([0, 1]), np.float32(2))
    jax.tree.map(np.testing.assert_array_equal, whole, before)
