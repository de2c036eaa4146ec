r"""Rows that rest: where dense Adam has moved them since their last gradient.

After step `T` a row has the moments `m` and `v`. As long as no gradient follows, dense
Adam moves it at step `t = T + j` by `a_t b1^j m / (q^j sqrt(v) + eps rho_t)`, with
`q = sqrt(b2)`, `rho_t = sqrt(1 - b2^t)` and `a_t = lr_t rho_t / (1 - b1^t)`, after it
has multiplied it by `1 - lr_t wd`. With `P(a, b)` the product of these factors for the
steps after `a` up to `b`, let

    way(T, m, v) = sum over j >= 1 of a_t / P(T, t) * b1^j m / (q^j sqrt(v) + eps rho_t)

be the way that the row has still to go. One step later, `w` is `P w - P a_t ...`, the
moments are `b1 m` and `b2 v`, and the way lacks its first term and has one factor of
`P` less: `w - way` is multiplied by `P`, whatever the moments. So a table holds, in
place of the value `w` of a row at its last update, its *resting point* `w - way(T, m,
v)`, and `k = now - T` steps later

    w = P(T, now) * resting point + way(now, b1^k m, b2^k v).

All rows share the function `way(now)`, whenever they were updated: nothing is summed up
for a row, and after some hundred steps of rest its way is zero.

As a function of `s = sqrt(v)`, `(s + c) way / m` has its poles at `s = -eps rho_t q^-j`
only. The map `z = (s - c) / (s + c)` takes `s` from `[0, inf)` to `[-1, 1)` and the
poles away from there, so that a polynomial through the values at the Chebyshev nodes
converges, in the first steps, when `rho_t` changes fastest, as `3^-n`, and faster later
(Trefethen, Approximation Theory and Approximation Practice, chapter 8).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .coalesce import accumulator_dtype
from .gather_scatter import expand


class Shared(NamedTuple):
    """A few numbers, the same for all rows.

    Attributes:
      log_b1: Logarithm of `b1`.
      log_q: Logarithm of the root of `b2`.
      eps: As given.
      lead: The centre `c` of a way after step `t` is `eps rho_(t + lead)`.
      way: The way ahead at the Chebyshev nodes, of parameters that do not decay;
        `None` if all do.
      decayed_way: The same of parameters that decay; `None` if none does.
      log_decay: Logarithm of the decay since the beginning, and what rounding left.
    """

    log_b1: jax.Array
    log_q: jax.Array
    eps: jax.Array
    lead: jax.Array
    way: jax.Array | None
    decayed_way: jax.Array | None
    log_decay: tuple[jax.Array, ...]


class Whole(NamedTuple):
    """A few numbers of one parameter.

    Rows that were last updated at step `since`, or before, hold their value at that
    step, not their resting point: all rows in the beginning, after `flush`, and after
    a dense gradient.

    Attributes:
      since: The step.
      way: The way from that step to now, at the Chebyshev nodes.
    """

    since: jax.Array
    way: jax.Array


class ExactAdamState(NamedTuple):
    """State of `exact_adam` and of `exact_adamw`.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      mu: Tree like the parameters: moving average of the gradient, of each row as it
        was after the row's last update.
      nu: Tree like the parameters: moving average of the squared gradient, alike.
      last: Tree like the parameters, without their last axis: step of each row's last
        update, `int32`.
      log_decay: Tree like `last`: logarithm of the weight decay up to there, in two
        numbers; `()` in place of a parameter that does not decay.
      whole: Tree like the parameters, of a few numbers for each.
      shared: A few numbers for all.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: Any
    nu: Any
    last: Any
    log_decay: Any
    whole: Any
    shared: Shared


class RowState(NamedTuple):
    """What is known of each row of one parameter, or of some of its rows.

    Attributes:
      mu: First moment after the row's last update.
      nu: Second moment after it.
      last: The step of it, without the axis of the columns.
      log_decay: `Shared.log_decay` after it; empty if the parameter does not decay.
    """

    mu: jax.Array
    nu: jax.Array
    last: jax.Array
    log_decay: tuple[jax.Array, ...]


class Moved(NamedTuple):
    """Rows now: `exp(log_decay) * stored + by`, and their moments."""

    log_decay: jax.Array | None
    by: jax.Array
    mu: jax.Array
    nu: jax.Array


def nodes(degree: int) -> np.ndarray:
    """The Chebyshev nodes."""
    z: np.ndarray = np.cos(np.pi * (np.arange(degree) + 0.5) / degree)
    return z


def chebyshev_coefficients(degree: int) -> np.ndarray:
    """The matrix from values at the nodes to coefficients of Chebyshev polynomials."""
    angles = np.outer(np.arange(degree), np.pi * (np.arange(degree) + 0.5) / degree)
    scales = np.where(np.arange(degree) > 0, 2 / degree, 1 / degree)
    matrix: np.ndarray = scales[:, None] * np.cos(angles)
    return matrix


def _monomials(degree: int) -> np.ndarray:
    """The matrix from coefficients of Chebyshev polynomials to those of powers."""
    matrix = np.zeros((degree, degree))
    for n, unit in enumerate(np.eye(degree)):
        matrix[: n + 1, n] = np.polynomial.chebyshev.cheb2poly(unit[: n + 1])
    return matrix


def sum_at_nodes(terms: Any, poles: Any, powers: tuple[Any, Any], z: Any) -> Any:
    """`(s + c) way / m`, a sum over steps, at each `z`.

    Args:
      terms: `a_t / P(T, t)` of each step.
      poles: `eps rho_t / c` of each step.
      powers: `b1^j` and `q^j` of each step.
      z: Where.
    """
    x = (1 + z[:, None]) / 2  # s / (s + c)
    decays = x * powers[1][None, :] + (1 - x) * poles[None, :]
    return ((terms * powers[0])[None, :] / decays).sum(axis=1)


def polynomial(values: jax.Array) -> list[jax.Array]:
    """Coefficients of the powers of `z`, from the values at the nodes.

    By way of coefficients of Chebyshev polynomials, which fall as fast as the entries
    of the second matrix grow: in a product of both matrices large numbers would cancel.
    """
    degree = len(values)
    for matrix in (chebyshev_coefficients(degree), _monomials(degree)):
        # Not a matrix product, which some devices compute in lower precision.
        values = jnp.sum(jnp.asarray(matrix, values.dtype) * values[None, :], axis=1)
    return list(values)


def way_of(coefficients: list[Any], mu: Any, root: Any, centre: Any) -> jax.Array:
    """The way of rows with this first moment and this root of the second."""
    inverse = 1 / (root + centre)
    z = (root - centre) * inverse
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    way: jax.Array = mu * inverse * total
    return way


def way_ahead(shared: Shared, decays: bool) -> jax.Array:
    """The way ahead at the nodes, of a parameter that decays or not."""
    way = shared.decayed_way if decays else shared.way
    assert way is not None  # as there is such a parameter
    return way


def centre_of_way(shared: Shared, count: jax.Array) -> jax.Array:
    """The centre of the way after step `count`."""
    steps = (count + shared.lead.astype(count.dtype)).astype(shared.log_q.dtype)
    return shared.eps * jnp.sqrt(-jnp.expm1(2 * shared.log_q * steps))


def cast_floats(tree: Any, dtype: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def cast_shared(shared: Shared, dtype: Any) -> Shared:
    cast: Shared = cast_floats(shared, dtype)
    if shared.log_decay:
        # What the first number loses in a smaller type goes to the second.
        high, low = shared.log_decay
        lost = high - cast.log_decay[0].astype(high.dtype)
        cast = cast._replace(log_decay=(cast.log_decay[0], (lost + low).astype(dtype)))
    return cast


def move_rows(rows: RowState, whole: Whole, shared: Shared, count: jax.Array) -> Moved:
    """Where rows are after step `count`; computes in the type of the moments."""
    mu, nu, last, log_decay = rows
    whole, shared = cast_floats(whole, mu.dtype), cast_shared(shared, mu.dtype)
    steps = (count - last).astype(mu.dtype)
    power1, power2 = jnp.exp(steps * shared.log_b1), jnp.exp(steps * shared.log_q)
    is_value = last <= whole.since

    def pick(of_value: Any, of_resting_point: Any) -> jax.Array:
        return expand(jnp.where(is_value, of_value, of_resting_point), mu)

    one = jnp.ones_like(power1)
    ahead = way_ahead(shared, bool(log_decay))
    pairs = zip(polynomial(whole.way), polynomial(ahead), strict=True)
    by = way_of(
        [pick(*pair) for pair in pairs],
        mu * pick(-one, power1),
        jnp.sqrt(nu) * pick(one, power2),
        pick(centre_of_way(shared, whole.since), centre_of_way(shared, count)),
    )
    power1, power2 = expand(power1, mu), expand(power2, mu)
    decay = None
    if log_decay:
        # Exact, as the numbers are close; one number alone would lose what a long
        # training makes small beside the sum.
        (old, old_rest), (new, new_rest) = log_decay, shared.log_decay
        decay = expand((new - old) + (new_rest - old_rest), mu)
    return Moved(decay, by, power1 * mu, power2 * (power2 * nu))


def compute_type(param: jax.Array, rows: RowState) -> Any:
    return accumulator_dtype(param.dtype, rows.mu.dtype, rows.nu.dtype)


def rows_now(param: jax.Array, moved: Moved) -> jax.Array:
    """The values of rows, in the type of the parameter."""
    value = param.astype(moved.by.dtype)
    if moved.log_decay is not None:
        value = jnp.exp(moved.log_decay) * value
    return (value + moved.by).astype(param.dtype)


def stamp(
    rows: RowState, shared: Shared, count: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`last` and `log_decay` of rows that are brought to step `count`."""

    def stamped(old: jax.Array, new: jax.Array) -> jax.Array:
        # Nothing is later than now. Without this, the new numbers would not depend on
        # the old ones, and XLA for CPUs, which then may scatter before it has gathered,
        # copies all of them to be safe (see `tests/optimizers/test_memory.py`).
        return jnp.where(rows.last > count, old, new.astype(old.dtype))

    if not rows.log_decay:
        return stamped(rows.last, count), ()
    decays = cast_shared(shared, rows.log_decay[0].dtype).log_decay
    pairs = zip(rows.log_decay, decays, strict=True)
    return stamped(rows.last, count), tuple(stamped(*pair) for pair in pairs)


def is_exact(node: Any) -> bool:
    return isinstance(node, ExactAdamState)


def exact_states(state: Any, name: str) -> tuple[list[Any], Any]:
    """The state of an optimiser, cut into states of `exact_adam` and other leaves.

    Raises:
      ValueError: If it holds none of them.
    """
    nodes, structure = jax.tree.flatten(state, is_leaf=is_exact)
    if not any(map(is_exact, nodes)):
        raise ValueError(
            f"{name} needs the state of an optimiser that contains exact_adam or "
            f"exact_adamw, got {jax.tree.structure(state)}. No other optimiser has "
            "rows that are to be brought up to date."
        )
    return nodes, structure


def _trees(state: ExactAdamState) -> tuple[Any, ...]:
    return state.mu, state.nu, state.last, state.log_decay, state.whole


def held_by(state: ExactAdamState, treedef: Any) -> dict[int, tuple[RowState, Whole]]:
    """What is known of each parameter, by its place; not of those that are masked.

    Raises:
      ValueError: If the state belongs to parameters of another structure.
    """
    why = "a part of the tree stands where one parameter should"
    try:
        columns = [treedef.flatten_up_to(tree) for tree in _trees(state)]
        parts = enumerate(zip(*columns, strict=True))
        # What is masked leaves a hole: a node without leaves.
        held = {i: part for i, part in parts if jax.tree.leaves(part)}
        if all(isinstance(whole, Whole) for *_, whole in held.values()):
            return {i: (RowState(*rows), whole) for i, (*rows, whole) in held.items()}
    except ValueError as error:
        why = str(error)
    raise ValueError(
        "The state of exact_adam must belong to parameters of the structure "
        f"{treedef}, got a state for {jax.tree.structure(state.nu)}: {why}"
    )


def replace_held(
    state: ExactAdamState, treedef: Any, parts: dict[int, tuple[RowState, Whole]]
) -> ExactAdamState:
    """The state with other parts, in the places of `held_by`."""
    columns = [treedef.flatten_up_to(tree) for tree in _trees(state)]
    for i, (rows, whole) in parts.items():
        for column, new in zip(columns, (*rows, whole), strict=True):
            column[i] = new
    mu, nu, last, log_decay, whole = map(treedef.unflatten, columns)
    return state._replace(mu=mu, nu=nu, last=last, log_decay=log_decay, whole=whole)


def values_of_rows(
    param: jax.Array,
    rows: RowState,
    whole: Whole,
    shared: Shared,
    count: jax.Array,
) -> jax.Array:
    """The values of rows, or of a whole parameter, after step `count`."""
    mu, nu = (x.astype(compute_type(param, rows)) for x in (rows.mu, rows.nu))
    moved = move_rows(rows._replace(mu=mu, nu=nu), whole, shared, count)
    return rows_now(param, moved)
