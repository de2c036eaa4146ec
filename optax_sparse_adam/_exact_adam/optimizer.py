"""Dense Adam's own numbers, at the cost of the rows that a gradient holds."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax_extras.huge_pages import use_huge_pages
from .._jax_extras.sharding import jit_on_mesh
from .._optimizers.by_leaf import all_but_last
from .._optimizers.hyperparameters import (
    NUMBER,
    check_at_least,
    check_betas,
    check_eps,
    check_leaf,
    check_state_class,
    floating_type,
)
from .._optimizers.update_rows import Updated, UpdateRows
from .._rows.canary import is_read_at, lacks_clock, without_clock
from .._rows.checks import is_bcoo, is_leaf, leaves_like, refuse_complex
from .._rows.entries import accumulator_dtype
from .._rows.gather_scatter import gather_rows
from .._rows.new_arrays import full_along
from .._rows.row_ops import Update
from .rows import (
    Betas,
    stale_arrays,
    step_arrays,
    update_touched_rows,
    update_whole,
)
from .schedule import (
    Schedule,
    checked_constants,
    constants_of,
    decay_of,
    fit,
    hold_values,
    is_continued,
    largest_decay,
    outlook,
    take_step,
)
from .state import (
    ExactAdamState,
    replaced,
    rows_by_parameter,
    table_states,
)


def _schedule(value: Any, name: str) -> Schedule:
    """A number or a schedule as a schedule."""
    if callable(value):
        return value
    if not isinstance(value, NUMBER):
        raise TypeError(
            f"exact_adam needs a {name} that is known for all steps to come, since "
            "stale rows are advanced with it: a Python number, or a schedule of the "
            f"step count; got {type(value).__name__}. optax.inject_hyperparams gives "
            "arrays, which may change by hand. To change it by hand, call "
            "flush(params, state) and make a new exact_adam of the same b1, b2 and "
            "eps, which takes the state."
        )
    check_at_least(name, value, 0)
    return lambda count: value


def _check(b1: Any, b2: Any, eps: Any, eps_root: Any) -> None:
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps), ("eps_root", eps_root)):
        if not isinstance(value, NUMBER):
            raise TypeError(
                f"exact_adam needs {name} as a Python number, got "
                f"{type(value).__name__}: stale rows are advanced by a sum whose "
                "length follows from it."
            )
    check_betas(b1, b2)
    check_eps(eps)
    smallest = 1e-36 / math.sqrt(1 - b2)
    if eps < smallest:
        raise ValueError(
            f"exact_adam needs an eps of at least {smallest:.2g} for b2={b2}, got "
            f"{eps}: its inverse, and that of eps * sqrt(1 - b2), must be numbers of "
            "float32."
        )
    if eps_root != 0:
        raise ValueError(
            f"exact_adam supports eps_root=0.0 only, got {eps_root}: the updates "
            "of a stale row can be summed up without it only. Use eps, or optax.adam."
        )
    if not b1 * b1 < b2:
        raise ValueError(
            f"exact_adam needs b1 < sqrt(b2), got b1={b1} and b2={b2}: otherwise the "
            "moves of a row without gradients grow from step to step, and their sum "
            "does not end. Choose a smaller b1 or a larger b2."
        )


def _check_decay(state: ExactAdamState, own: str) -> None:
    given = "exact_adamw" if state.log_decay else "exact_adam"
    if given != own:
        raise ValueError(
            f"{own} needs a state that was made by {own}, got that of {given}: "
            "only the state of exact_adamw knows how far each row has decayed. To "
            "change the weight decay between runs, use exact_adamw in all of them, "
            "with weight_decay=0 where nothing decays."
        )


def _check_read(grad: Any, path: Any, clock: jax.Array) -> Any:
    """Whether the gradient was made with `read=` of this state, as far as is known."""
    is_read = is_read_at(grad, clock) if not lacks_clock(grad) else False
    if not isinstance(is_read, jax.core.Tracer) and not is_read:
        name = jax.tree_util.keystr(path) or "the table"
        made = "without" if lacks_clock(grad) else "with the state of another step"
        raise ValueError(
            "exact_adam needs gradients that are made with read=, at the rows as dense "
            f"Adam has them; got one of {name} made {made}. Call "
            "value_and_grad(loss, read=state) with the state of the optimiser in "
            "each step, or let make_train_step do so."
        )
    return is_read


def _check_place(grad: Any, param: Any, path: Any) -> Any:
    """Whether its rows were read of these parameters, as far as is known.

    Those of a copy are brought up to date as if they were these: an average of stored
    rows is none of values, and what was added to a row decays with it.
    """
    is_right: Any = True
    for other in getattr(grad, "read_of", ()):
        if other is param or param is None:
            continue
        if jnp.shape(other) != jnp.shape(param):
            continue  # the gradient is that of a shard, by `local_rows`
        if not isinstance(other, jax.core.Tracer) and jnp.asarray(other).is_deleted():
            continue  # it was donated, and nothing is known of it
        old, new = (gather_rows(jnp.asarray(x), grad.indices) for x in (other, param))
        new = new.astype(old.dtype)  # as those of a copy of lower precision
        is_right &= jnp.all((old == new) | (jnp.isnan(old) & jnp.isnan(new)))
    if not isinstance(is_right, jax.core.Tracer) and not is_right:
        name = jax.tree_util.keystr(path) or "the table"
        raise ValueError(
            "exact_adam needs gradients that are taken at the parameters that it "
            f"updates; got one of {name} taken at others, as of a perturbed copy or "
            "an average. Perturb the rows that the loss has looked up instead: see "
            "docs/exact_adam.md."
        )
    return is_right


def _check_continued(is_right: jax.Array) -> jax.Array:
    if not isinstance(is_right, jax.core.Tracer) and not is_right.all():
        raise ValueError(
            "exact_adam needs the schedule and the count by which its state has moved "
            "stale rows; got a state of another learning rate, weight decay, nesterov "
            "or count. Call params, state = flush(params, state) before any of them "
            "changes: after it, all of them may."
        )
    return is_right


def _check_clock(clock: jax.Array) -> jax.Array:
    has_room = clock < jnp.iinfo(clock.dtype).max
    if not isinstance(has_room, jax.core.Tracer) and not has_room:
        raise ValueError(
            "exact_adam dates rows by a clock of 32 bits, and this state has made "
            "2**31 - 1 updates. Call params, state = flush(params, state), make a new "
            "state by init, and give it mu, nu and count of the old one."
        )
    return has_room


def _exact_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    mu_dtype: Any,
    nesterov: bool,
    weight_decay: Any,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """Both public forms; `weight_decay` is `None` where nothing decays."""
    own = "exact_adam" if weight_decay is None else "exact_adamw"
    rate = _schedule(learning_rate, "learning rate")
    _check(b1, b2, eps, eps_root)
    decay = None
    if weight_decay is not None:
        decay = _schedule(weight_decay, "weight decay")
        are_known = isinstance(learning_rate, NUMBER), isinstance(weight_decay, NUMBER)
        limit = largest_decay(b1, b2)
        if all(are_known) and not learning_rate * weight_decay <= limit:
            raise ValueError(
                "exact_adamw needs learning_rate * weight_decay of at most "
                f"(1 - b1 / sqrt(b2)) / 2 = {limit:.3g}, got {learning_rate} * "
                f"{weight_decay}: a row must keep more in a step than its momentum "
                "does. Choose a smaller weight_decay."
            )
    mu_dtype = floating_type(mu_dtype, "mu_dtype")
    betas = Betas(float(b1), float(b2), float(eps), bool(nesterov))
    fit(betas.b1, betas.b2, np.dtype("float32"))  # raises where there is none

    def decaying(params: optax.Params) -> Any:
        if decay is None or mask is None:
            return jax.tree.map(lambda _: decay is not None, params)
        marks = mask(params) if callable(mask) else mask
        return jax.tree.map(
            lambda mark, part: jax.tree.map(lambda _: bool(mark), part), marks, params
        )

    def init_fn(params: optax.Params) -> ExactAdamState:
        for leaf in jax.tree.leaves(params):
            refuse_complex(leaf, own)
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    "exact_adam trains floating-point parameters, got "
                    f"{jnp.result_type(leaf)} of shape {jnp.shape(leaf)}. Leave it out "
                    "with optax.masked or optax.partition."
                )
        use_huge_pages(params)
        dtype = jnp.result_type(float)
        degree = fit(betas.b1, betas.b2, dtype)[1]

        def for_each(make: Callable[[Any], jax.Array]) -> Any:
            return jax.tree.map(make, params)

        def for_rows(param: Any, dtype: Any) -> jax.Array:
            return full_along(param, 0, dtype, all_but_last(jnp.ndim(param)))

        def log_decay(param: Any) -> jax.Array:
            return for_rows(param, accumulator_dtype(jnp.result_type(param)))

        size = len(jax.tree.leaves(params))
        return ExactAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=for_each(functools.partial(full_along, dtype=mu_dtype)),
            nu=for_each(full_along),
            last=for_each(lambda param: for_rows(param, jnp.int32)),
            log_decay=(for_each(log_decay), for_each(log_decay)) if decay else (),
            clock=jnp.zeros([], jnp.int32),
            origin=jnp.zeros([], jnp.int32),
            values_until=jnp.zeros([size], jnp.int32),
            remaining=jnp.zeros([size, 2, degree], dtype),
            decay=jnp.zeros([size, 2], dtype) if decay else (),
            constants=constants_of(betas, dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: ExactAdamState,
        params: optax.Params | None,
        *,
        adds_to_params: bool,
    ) -> Updated:
        check_state_class(state, ExactAdamState, own)
        _check_decay(state, own)
        state = state._replace(count=jnp.asarray(state.count, state.clock.dtype))
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_leaf)
        grads = [grad for _, grad in paths]
        olds: list[Any] = [None] * len(grads)
        marks = [decay is not None] * len(grads)
        if params is not None:
            olds = leaves_like(treedef, params, "Parameters", "gradients")
            marks = treedef.flatten_up_to(decaying(params))
        elif decay is not None:
            raise ValueError(
                "exact_adamw needs the parameters, which decay. Call "
                "update(updates, state, params)."
            )
        nus = leaves_like(treedef, state.nu, "The moments", "gradients")
        known = [nu if old is None else old for old, nu in zip(olds, nus, strict=True)]
        shapes = [None if x is None else jnp.shape(x) for x in known]
        rows = rows_by_parameter(state, shapes, treedef)
        # In the order of the state's arrays: where parameter 0 is masked, place 0 is
        # parameter 1.
        decays = np.array([marks[i] for i in rows], bool)
        constants = checked_constants(state, betas)
        view = outlook(state.count, rate, decay, betas, constants.eps.dtype)
        # In a program a wrong state cannot raise. It makes NaN: `eps` of what is read,
        # the learning rate of what is written, the remaining updates of all that comes
        # later.
        is_own = jnp.isfinite(constants.eps)
        rate_now = jnp.where(is_own, view.now.rate, jnp.nan)
        view = view._replace(now=view.now._replace(rate=rate_now))
        is_right = _check_continued(is_continued(state, view, decays, betas))
        is_right &= _check_clock(state.clock)
        constants = constants._replace(eps=jnp.where(is_right, constants.eps, jnp.nan))
        # After `flush`, `count` may have been set by hand, and `origin` follows it.
        before = table_states(state)
        origin = state.count - state.clock
        after = take_step(before._replace(origin=origin), constants, view, decays)
        remaining = jnp.where(is_right[:, None, None], after.remaining, jnp.nan)
        count = optax.safe_increment(state.count)  # which may stand still
        after = after._replace(remaining=remaining, origin=count - after.clock)
        # Rows of a parameter with a dense gradient hold their value, before and after.
        is_dense = [not (grads[i] is None or is_bcoo(grads[i])) for i in rows]
        after = hold_values(after, np.array(is_dense, bool))
        is_read = [True] * len(rows)
        for place, i in enumerate(rows):
            if grads[i] is not None:
                check_leaf(grads[i], rows[i].nu)
                if is_bcoo(grads[i]):
                    is_read[place] = _check_read(grads[i], paths[i][0], state.clock)
                    is_read[place] &= _check_place(grads[i], olds[i], paths[i][0])
        eps = jnp.where(jnp.stack(is_read), constants.eps, jnp.nan)
        constants, step = constants._replace(eps=eps), view.now
        if decay is not None:
            step = step._replace(log_decay=decay_of(step, decays))
        states = before.with_polynomials(), after.with_polynomials()
        # As the lookups have it, so that XLA computes it once. What is not of this
        # optimiser is NaN by what `step_arrays` adds.
        arrays = stale_arrays(states[0], state.constants)
        arrays = step_arrays(arrays, states[1], constants, step, betas)
        made = [*map(Update, grads)]
        whole = []
        for place, i in enumerate(rows):
            if is_dense[place]:
                whole.append(i)
            if not is_bcoo(grads[i]):
                continue
            read: Any = ()
            own_step = step
            if step.log_decay is not None:
                read = (olds[i],)
                own_step = step._replace(log_decay=step.log_decay[place])
            own_constants = constants._replace(eps=constants.eps[place])
            args = (*(x.at(place) for x in states), own_constants, own_step)
            made[i], rows[i] = update_touched_rows(
                without_clock(grads[i]),
                read,
                rows[i],
                *args,
                arrays.at(place),
                olds[i] if adds_to_params else None,
                betas=betas,
            )
        if whole:
            places = np.flatnonzero(is_dense).tolist()
            names = [jax.tree_util.keystr(paths[i][0]) for i in whole]
            is_stale = state.refuse_stale(dict(zip(places, names, strict=True)))
            # One rate for all: XLA would compute those of all in the fusion of each.
            own_rate = jnp.where(is_stale, jnp.nan, view.now.rate)
            news = update_whole(
                [grads[i] for i in whole],
                [olds[i] for i in whole],
                [rows[i] for i in whole],
                own_rate,
                state.count,
                after.clock,
                view.now.weight_decay,
                betas=betas,
                decays=tuple(decays[places].tolist()),
            )
            for i, change, new in zip(whole, *news, strict=True):
                made[i], rows[i] = Update(change), new
        state = replaced(state, [*rows.values()], after)
        count = optax.safe_increment(state.count)
        return treedef, made, state._replace(count=count)

    update = UpdateRows(update_fn)
    return optax.GradientTransformationExtraArgs(jit_on_mesh(init_fn), update)


def exact_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The numbers of `optax.adam` on the dense gradient, at the cost of the batch.

    Dense Adam moves every row in every step: a row that the batch does not hold goes on
    with its momentum. `sparse_adam` and `lazy(optax.adam)` leave such a row alone.
    `exact_adam` moves it, but computes its value only when it is read. In a step `t`
    without a gradient for a row `p` with the moments `m` and `v`, at the learning rate
    :math:`\alpha_t`,

    .. math::

      m \leftarrow b_1 m, \quad v \leftarrow b_2 v, \quad
      p \leftarrow p - \alpha_t \frac{\sqrt{1 - b_2^t}}{1 - b_1^t}
        \frac{m}{\sqrt{v} + \epsilon \sqrt{1 - b_2^t}}

    While a row has no gradient, it is *stale*: its updates depend only on its moments
    and on the schedule, so the sum of those to come, the *remaining update*, can be
    computed in advance. After a row-sparse gradient the parameters hold the row's
    *projected final value*, to which its momentum will carry it. Its value at a later
    step is the projected final value minus the remaining update at that step, which
    vanishes after some hundred steps. A few numbers, computed once in each step from
    the schedule, give the remaining update of any row.

    `make_train_step` makes the whole step. By hand, it is::

      loss, grads = osa.value_and_grad(loss_fn, read=state)(params, batch)
      updates, state = tx.update(grads, state, params)
      params = osa.apply_updates(params, updates)

    With `read=state` (see `value_and_grad`) the loss looks rows up as dense Adam would
    have them now; without it, it would see projected final values, and `update` raises.
    For evaluation there is `evaluate(fun, read=state)`. `flush(params, state)` writes
    the values into the parameters: call it before an export, and before a change of the
    learning rate by hand. A change without it raises or, inside a compiled program,
    makes the rows NaN. Nothing may change the updates: what follows in a chain raises.
    Checkpoints of `(params, state)` for this optimiser need no flush.

    A gradient leaf may be a row-sparse BCOO; a dense array; or `None`, which is a
    gradient of zeros at no cost: to freeze a parameter use `optax.partition` or
    `optax.masked`. A parameter whose gradients are always dense takes the step of
    `optax.adam`, and holds its values. A dense gradient of a parameter with stale rows
    is refused, and in a compiled program becomes NaN: call `flush` before it. To clip
    by the norm of all gradients, put `lazy(optax.clip_by_global_norm(...))` before it
    in a chain.

    Beside the moments, the state takes 4 bytes for each row, and 12 in `exact_adamw`. A
    step costs what a step of `sparse_adam` costs and, for `read`, the lookups of the
    moments; the page on exact Adam of the documentation says how much that is.
    Arithmetic is in float32 at least, and closer to Adam in exact arithmetic than dense
    Adam in float32: a stale row is not rounded in each step.

    `sparse_adam` is better where stale rows should not move: in dense Adam rare rows
    go on moving for some ten steps after each gradient. When moving from dense to lazy
    Adam, mind the learning rate: a row that a share `f` of the batches hold is moved by
    dense Adam by about `lr / sqrt(f)` for each gradient (`f` above `1 - b2`), by lazy
    Adam by `lr`, which is less.

    Args:
      learning_rate: A Python number of at least 0, or a schedule, called with the
        numbers of steps before this one and before those to come, as traced scalars. It
        must be a function of that number alone. Where it is NaN or infinite in steps to
        come, rows do not move; where it grows in all of them as fast as momentum dies
        out, they become NaN.
      b1: Decay of the moving average of the gradient, in `[0, 1)`; below `sqrt(b2)`.
      b2: Decay of the moving average of the squared gradient, in `[0, 1)`.
      eps: Added to the root of the corrected second moment, as in `optax.adam`; at
        least `1e-36 / sqrt(1 - b2)`.
      eps_root: 0; anything else is refused.
      mu_dtype: Type of `mu`; the parameter's own by default.
      nesterov: As in `optax.adam`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ExactAdamState`. Its
      `update` raises `TypeError` and `ValueError` for gradients as that of
      `sparse_adam` does, and `ValueError` for a gradient of single elements, for one
      that was made without `read=`, and, outside of a compiled program, for a state
      of another schedule.

    Raises:
      TypeError: If a hyper-parameter is an array, such as those of
        `optax.inject_hyperparams`.
      ValueError: If one is out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> params, tx = {"table": jnp.ones((1000, 4))}, osa.exact_adam(0.1)
      >>> state = tx.init(params)
      >>> for ids in ([3, 3, 7], [5, 7, 9]):
      ...     loss = lambda p: jnp.sum(p["table"][jnp.array(ids)] ** 2)
      ...     grads = osa.grad(loss, read=state)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = osa.apply_updates(params, updates)
      >>> params, state = osa.flush(params, state)
      >>> [round(float(params["table"][i, 0]), 4) for i in (0, 3, 7)]
      [1.0, 0.833, 0.8004]

    References:
      Kingma and Ba, `Adam: A Method for Stochastic Optimization
      <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    return _exact_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, None, None
    )


def exact_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""The numbers of `optax.adamw` on the dense gradient, at the cost of the batch.

    `exact_adam` with decoupled weight decay; see there. Every row decays in every step,
    whether the batch holds it or not:

    .. math::

      p \leftarrow (1 - \alpha_t \lambda_t) \, p - \alpha_t
        \frac{m / (1 - b_1^t)}{\sqrt{v / (1 - b_2^t)} + \epsilon}

    `lr * weight_decay` must be at most `(1 - b1 / sqrt(b2)) / 2`: 0.0497 with the
    default betas. A product of numbers above it raises; where schedules exceed it, now
    or within the steps of a remaining update, the rows become NaN.

    Args:
      learning_rate: As in `exact_adam`.
      b1: As in `exact_adam`.
      b2: As in `exact_adam`.
      eps: As in `exact_adam`.
      eps_root: As in `exact_adam`.
      mu_dtype: As in `exact_adam`.
      weight_decay: A Python number of at least 0, or a schedule.
      mask: Which parameters decay: a tree of booleans, or a prefix of it, or a function
        of the parameters that returns one.
      nesterov: As in `optax.adamw`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ExactAdamState`, whose
      `update` needs the parameters.

    Raises:
      TypeError: If a hyper-parameter is an array.
      ValueError: If one is out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.ones((1000, 4)), osa.exact_adamw(0.1, weight_decay=0.1)
      >>> step = osa.make_train_step(lambda t, ids: jnp.sum(t[ids] ** 2), tx)
      >>> table, state, _ = step(table, tx.init(table), jnp.array([3, 7]))
      >>> table, state = osa.flush(table, state)
      >>> [round(float(table[i, 0]), 4) for i in (0, 3, 7)]
      [0.99, 0.89, 0.89]

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2017.
    """
    return _exact_adam(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, weight_decay, mask
    )
