r"""Rows that rest: where dense Adam has moved them since their last gradient.

After step `T` a row has the moments `m` and `v`. As long as no gradient follows, dense
Adam moves it at step `t = T + j` by `a_t b1^j m / (q^j sqrt(v) + eps rho_t)`, with
`q = sqrt(b2)`, `rho_t = sqrt(1 - b2^t)` and `a_t = lr_t rho_t / (1 - b1^t)`, after it
has multiplied it by `1 - lr_t wd`. With `P(a, b)` the product of these factors for the
steps after `a` up to `b`, let

    way(T, m, v) = sum over j >= 1 of a_t / P(T, t) * b1^j m / (q^j sqrt(v) + eps rho_t)

be the way that the row has still to go. In the next step `w` becomes `P w - a_t ...`
and the way `P way - a_t ...`, as it loses its first term and one factor of all others:
`w - way` is multiplied by `P`, whatever the moments are. So a table holds, in place of
the value `w` of a row after its last update, its *resting point* `w - way(T, m, v)`,
and `k = now - T` steps later

    w = P(T, now) * resting point + way(now, b1^k m, b2^k v).

All rows share the function `way(now)`, whenever they were updated: nothing is summed up
for a row, and after some hundred steps of rest its way is zero.

As a function of `s = sqrt(v)`, `(s + c) way / m` has its poles at `s = -eps rho_t q^-j`
only. The map `z = (s - c) / (s + c)` takes `s` from `[0, inf)` to `[-1, 1)` and the
poles away from there, so that a polynomial through the values at the Chebyshev nodes
converges, in the first steps, when `rho_t` changes fastest, as `3^-n`, and faster later
(Trefethen, Approximation Theory and Approximation Practice, chapter 8). Where `b2` is
so small that `q^-j` grows before the terms die out, as with the betas 0.9 and 0.95, the
poles come close to `z = 1`. There `z = (sqrt(s) - sqrt(c)) / (sqrt(s) + sqrt(c))` is
better, which has all of them on the unit circle.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .coalesce import accumulator_dtype
from .padding import expand_like


class Constants(NamedTuple):
    """The constants of one optimiser.

    Attributes:
      log_b1: Logarithm of `b1`.
      log_q: Logarithm of the root of `b2`.
      eps: As given.
      lead: The centre `c` of a way after step `t` is `eps rho_(t + lead)`.
    """

    log_b1: jax.Array
    log_q: jax.Array
    eps: jax.Array
    lead: jax.Array


class ExactAdamState(NamedTuple):
    """State of `exact_adam` and of `exact_adamw`.

    On a mesh, what has rows (`mu`, `nu`, `last` and `log_decay`) is sharded as the
    parameters are along theirs; the rest is a few numbers.

    Attributes:
      count: Number of updates so far, an `int32` scalar.
      mu: Tree like the parameters: moving average of the gradient, of each row as it
        was after the row's last update.
      nu: Tree like the parameters: moving average of the squared gradient, alike.
      last: Tree like the parameters, without their last axis: step of each row's last
        update, `int32`.
      log_decay: Two trees like `last`: logarithm of the weight decay from the beginning
        to the last update, and what rounding left of it; `()` without weight decay.
      since: Tree like the parameters: rows that were last updated at this step, or
        before, hold their value after it, not their resting point. A scalar each.
      ways: Tree like the parameters: the way since that step, and the way ahead, at the
        Chebyshev nodes, `[2, nodes]` each.
      decay: Tree like the parameters: `log_decay` of now, `[2]` each; `()` without.
      constants: Of the optimiser.
    """

    count: jax.Array  # type: ignore[assignment]  # tuple has a method count
    mu: Any
    nu: Any
    last: Any
    log_decay: tuple[Any, ...]
    since: Any
    ways: Any
    decay: Any
    constants: Constants


class RowState(NamedTuple):
    """What is known of each row of one parameter, or of some; see `ExactAdamState`."""

    mu: jax.Array
    nu: jax.Array
    last: jax.Array
    log_decay: tuple[jax.Array, ...]


class Whole(NamedTuple):
    """What is known of a parameter as a whole; see `ExactAdamState`."""

    since: jax.Array
    ways: jax.Array
    decay: jax.Array | None


class Moved(NamedTuple):
    """Rows now: `exp(log_decay) * stored + by`, and their moments."""

    log_decay: jax.Array | None
    by: jax.Array
    mu: jax.Array
    nu: jax.Array


def is_of_roots(degree: int) -> bool:
    """Whether `z` is that of `sqrt(s)`: an odd number of nodes says so, an even not.

    The number is all that is known while tracing of the betas that a state is for.
    """
    return degree % 2 == 1


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
    near, far = (1 - z[:, None]) / 2, (1 + z[:, None]) / 2
    if is_of_roots(len(z)):
        scale = near * near + far * far
        near, far = near * near / scale, far * far / scale
    # c / (s + c) and s / (s + c)
    decays = far * powers[1][None, :] + near * poles[None, :]
    return ((terms * powers[0])[None, :] / decays).sum(axis=1)


def polynomial(values: jax.Array, dtype: Any) -> list[jax.Array]:
    """Coefficients of the powers of `z`, from the values at the nodes.

    Only the result may be cast to a smaller type, for which there are too many nodes.

    By way of coefficients of Chebyshev polynomials, which fall as fast as the entries
    of the second matrix grow: in a product of both matrices large numbers would cancel.
    """
    degree = len(values)
    for matrix in (chebyshev_coefficients(degree), _monomials(degree)):
        # Not a matrix product, which some devices compute in lower precision.
        values = jnp.sum(jnp.asarray(matrix, values.dtype) * values[None, :], axis=1)
    return list(values.astype(dtype))


def way_of(coefficients: list[Any], mu: Any, root: Any, centre: Any) -> jax.Array:
    """The way of rows with this first moment and this root of the second."""
    inverse = 1 / (root + centre)
    z = (root - centre) * inverse
    if is_of_roots(len(coefficients)):
        root, centre = jnp.sqrt(root), jnp.sqrt(centre)
        z = (root - centre) / (root + centre)
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    way: jax.Array = mu * inverse * total
    return way


def centre_of_way(constants: Constants, count: jax.Array) -> jax.Array:
    """The centre of the way after step `count`."""
    steps = (count + constants.lead).astype(constants.log_q.dtype)
    return constants.eps * jnp.sqrt(-jnp.expm1(2 * constants.log_q * steps))


def cast_floats(tree: Any, dtype: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _decay_in(whole: Whole, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Both parts; what the first loses in a smaller type goes to the second."""
    assert whole.decay is not None  # where rows have one
    high, low = whole.decay
    cast = high.astype(dtype)
    return cast, ((high - cast.astype(high.dtype)) + low).astype(dtype)


def move_rows(
    rows: RowState, whole: Whole, constants: Constants, count: jax.Array
) -> Moved:
    """Where rows are after step `count`; computes in the type of the moments."""
    mu, nu, last, log_decay = rows
    dtype = mu.dtype
    constants = cast_floats(constants, dtype)
    steps = (count - last).astype(dtype)
    power1, power2 = jnp.exp(steps * constants.log_b1), jnp.exp(steps * constants.log_q)
    is_value = last <= whole.since

    def pick(of_value: Any, of_resting_point: Any) -> jax.Array:
        return expand_like(jnp.where(is_value, of_value, of_resting_point), mu)

    one = jnp.ones_like(power1)
    behind, ahead = (polynomial(way, dtype) for way in whole.ways)
    by = way_of(
        [pick(*pair) for pair in zip(behind, ahead, strict=True)],
        mu * pick(-one, power1),
        jnp.sqrt(nu) * pick(one, power2),
        pick(centre_of_way(constants, whole.since), centre_of_way(constants, count)),
    )
    power1, power2 = expand_like(power1, mu), expand_like(power2, mu)
    decay = None
    if log_decay:
        # A single float would lose what a step adds to the sum of a long training.
        (old, old_rest), (new, new_rest) = log_decay, _decay_in(whole, dtype)
        decay = expand_like((new - old) + (new_rest - old_rest), mu)
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
    rows: RowState, whole: Whole, count: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`last` and `log_decay` of rows that are brought to step `count`."""

    def stamped(old: jax.Array, new: jax.Array) -> jax.Array:
        # Problem: XLA for CPUs copies the table. Cause: it may scatter before it has
        # gathered, where new values do not depend on the old ones. Remedy: a select
        # that depends on them. Safe, because no row is later than now. Test:
        # `tests/optimizers/test_memory.py`.
        return jnp.where(rows.last > count, old, new.astype(old.dtype))

    if not rows.log_decay:
        return stamped(rows.last, count), ()
    decays = _decay_in(whole, rows.log_decay[0].dtype)
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


def _columns(state: ExactAdamState, treedef: Any) -> tuple[list[list[Any]], Any]:
    """The trees of a state as lists by parameter, and the structure of the trees.

    They have the structure of the parameters, or holes where `optax.masked` keeps some
    away. Or that of the same parameters in other containers, in the same order: Flax
    has `nnx.Param`s in a module's state and none in that of its optimiser.
    """
    own: Any = jax.tree.structure(
        state.nu, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    like = own if own.num_leaves == treedef.num_leaves else treedef
    trees = [state.mu, state.nu, state.last, *state.log_decay, state.since, state.ways]
    if state.log_decay:
        trees.append(state.decay)
    return [like.flatten_up_to(tree) for tree in trees], like


def _part(column: tuple[Any, ...]) -> tuple[RowState, Whole]:
    mu, nu, last, *rest = column
    *log_decay, since, ways, decay = rest if len(rest) > 2 else (*rest, None)
    return RowState(mu, nu, last, tuple(log_decay)), Whole(since, ways, decay)


def held_by(
    state: ExactAdamState, params: list[Any], treedef: Any
) -> dict[int, tuple[RowState, Whole]]:
    """What is known of each parameter, by its place; not of those that are masked.

    Raises:
      ValueError: If the state belongs to other parameters.
    """
    why = "the shapes differ"
    try:
        columns, _ = _columns(state, treedef)
        held = {
            i: _part(column)
            for i, column in enumerate(zip(*columns, strict=True))
            if jax.tree.leaves(column)  # a hole is a node without leaves
        }
        same = (rows.nu.shape == jnp.shape(params[i]) for i, (rows, _) in held.items())
        if all(same):
            return held
    except (AttributeError, ValueError) as error:
        why = str(error)
    raise ValueError(
        "The state of exact_adam must belong to the parameters, which have the "
        f"structure {treedef}; got a state for {jax.tree.structure(state.nu)}: {why}"
    )


def replace_held(
    state: ExactAdamState, treedef: Any, parts: dict[int, tuple[RowState, Whole]]
) -> ExactAdamState:
    """The state with other parts, in the places of `held_by`."""
    columns, like = _columns(state, treedef)
    for i, (rows, whole) in parts.items():
        news = (*rows[:3], *rows.log_decay, *whole)
        for column, new in zip(columns, news, strict=False):
            column[i] = new
    mu, nu, last, *trees = map(like.unflatten, columns)
    *log_decay, since, ways, decay = trees if state.log_decay else (*trees, ())
    return state._replace(
        mu=mu,
        nu=nu,
        last=last,
        log_decay=tuple(log_decay),
        since=since,
        ways=ways,
        decay=decay,
    )


def values_of_rows(
    param: jax.Array,
    rows: RowState,
    whole: Whole,
    constants: Constants,
    count: jax.Array,
) -> jax.Array:
    """The values of rows, or of a whole parameter, after step `count`."""
    mu, nu = (x.astype(compute_type(param, rows)) for x in (rows.mu, rows.nu))
    moved = move_rows(rows._replace(mu=mu, nu=nu), whole, constants, count)
    return rows_now(param, moved)
