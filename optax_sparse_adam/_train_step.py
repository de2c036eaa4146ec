"""`make_train_step`: gradient, update and addition as one compiled, donated step."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.experimental.sparse import BCOO
from jax.extend.core import Var

from ._gradients.value_and_grad import Sparse, value_and_grad
from ._optimizers.hyperparameters import check_transformation
from ._rows.apply_updates import ADDS, Added, apply_updates
from ._rows.canary import is_unseen
from ._rows.checks import is_bcoo
from ._rows.coalesce import coalesce
from ._rows.stale import contains_stale


def make_train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    sparse: Sparse = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """A training step: `params, state, value = step(params, state, *batch)`.

    The step is `value_and_grad`, with `read=state` for `exact_adam`, then `tx.update`
    and `apply_updates`, under one `jax.jit`. Parameters and state are donated: they are
    updated in place, and the old ones must not be used again. The first state is
    `tx.init(params)`.

    The kernel for CPUs adds updates of float32 tables while it computes them, with the
    same bits, unless something in `tx` computes with updates: `tx.update` is asked for
    that by the extra argument `adds_to_params=True`.

    Gradients are row-sparse wherever possible. Their duplicates are added up first for
    an optimiser that needs it, such as `optax.apply_if_finite`. An optimiser that takes
    dense gradients only, such as `optax.adam(1e-3)`, is refused: `exact_adam(1e-3)` has
    its numbers, `lazy(optax.adam(1e-3))` updates the rows of the batch only, and
    `sparse=False` makes dense gradients, at the cost of whole tables.

    Args:
      loss: `loss(params, *batch)`, a scalar, or a pair `(scalar, aux)` if `has_aux`.
      tx: The optimiser.
      has_aux: Whether `loss` returns a pair; `value` is that pair then.
      sparse: As in `value_and_grad`: which leaves are to be row-sparse.

    Returns:
      The step. An argument by keyword goes to the loss, to `tx.update` or to both, as
      they name it. It is traced, as under `jax.jit`, unless its default in the loss is
      a bool or a string, as that of `train=False`: then it is static. `tx.update` also
      gets the loss as `value`, and where all gradients are dense `grad` and `value_fn`,
      as the plateaus, Polyak steps and line searches of optax want them.

    Raises:
      TypeError: If `tx` is no transformation; by the step, if it takes no row-sparse
        gradients, or for a keyword that nobody reads. The step raises what its parts
        raise.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> def loss(params, ids):
      ...     return jnp.mean((params["table"][ids] @ params["w"] - 1) ** 2)
      >>> params = {"table": jnp.zeros((1000, 4)), "w": jnp.ones(4)}
      >>> tx = osa.sparse_adam(0.1)
      >>> step, state = osa.make_train_step(loss, tx), tx.init(params)
      >>> for _ in range(3):
      ...     params, state, value = step(params, state, jnp.array([3, 7, 3]))
      >>> round(float(value), 4)
      0.0252
    """
    check_transformation(tx, "make_train_step")
    of_loss, of_tx = _keywords(loss), _keywords(tx.update, skip=3)
    flags = [x.name for x in of_loss.values() if isinstance(x.default, bool | str)]

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames=flags)
    def step(_params: Any, _state: Any, /, *_batch: Any, **_keywords: Any) -> Any:
        # Names that a keyword may have, too: JAX asserts that they differ.
        params, state, batch, keywords = _params, _state, _batch, _keywords
        own = _taken_by(of_loss, keywords, other=of_tx)
        given = _taken_by(of_tx, keywords, other=of_loss)
        read = state if contains_stale(state) else None
        both = value_and_grad(loss, has_aux=has_aux, sparse=sparse, read=read)
        value, grads = both(params, *batch, **own)

        def value_fn(params: Any, **_: Any) -> Any:
            value = loss(params, *batch, **own)
            return value[0] if has_aux else value

        def apply(grads: Any, given: dict[str, Any]) -> Any:
            # What line searches and plateau schedules of optax take.
            extra = {"value": value[0] if has_aux else value}
            if read is None and not _sparse_leaves(grads):
                extra |= {"grad": grads, "value_fn": value_fn}
            extra = _taken_by(of_tx, extra) | given
            new_params, new, updates = update_params(tx, grads, state, params, **extra)
            return (new_params, new), updates

        grads, (results, updates) = _apply(lambda grads: apply(grads, given), grads)
        # An optimiser of rows returns unique ones, or makes a BCOO of its own.
        may_change = [x for x in _sparse_leaves(updates) if not x.unique_indices]
        if any(map(is_unseen, may_change)) and _computes_indices(
            lambda grads: apply(grads, given)[1], grads
        ):
            raise TypeError(_DENSE_ONLY + "It would scale indices with the values.")
        for name in keywords.keys() - own.keys():

            def apply_with(x: Any, name: str = name) -> Any:
                return apply(grads, given | {name: x})

            if not (name in given and _is_read(apply_with, given[name])):
                raise TypeError(
                    "Arguments of a training step by keyword go to the loss, if it has "
                    f"them, and to the optimiser; got `{name}`, which neither reads."
                )
        return *results, value

    return step


_DENSE_ONLY = (
    "make_train_step gives row-sparse gradients to the optimiser, and this one, or a "
    "part of it, takes dense ones only. For dense Adam's numbers take exact_adam or "
    "exact_adamw. To update the rows of the batch only, put that part inside lazy: "
    "lazy(optax.adam(1e-3)), or optax.chain(lazy(optax.clip_by_global_norm(1.0)), "
    "sparse_adam(1e-3)). Labels and masks that are functions see gradients; pass their "
    "trees: optax.partition(parts, labels(params)). For dense gradients, at the "
    "tables' price, pass sparse=False. "
)
# What arithmetic on all arrays of a tree does to the canary of a BCOO.
_ARITHMETIC = {"add", "mul", "sub", "neg", "sign", "div", "max", "min", "clamp"}
_ARITHMETIC |= {"integer_pow", "square"}

Keywords = dict[str, inspect.Parameter]


def _keywords(function: Callable[..., Any], skip: int = 0) -> Keywords:
    """The parameters of a function that can be given by keyword; `**` among them."""
    try:
        parameters = [*inspect.signature(function).parameters.items()][skip:]
    except (TypeError, ValueError):  # one that Python cannot look into
        return {}
    no_keywords = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    return {name: x for name, x in parameters if x.kind not in no_keywords}


def _taken_by(
    function: Keywords, given: dict[str, Any], other: Keywords | None = None
) -> dict[str, Any]:
    """Those keywords that a function names; and if it has `**`, those of nobody."""
    takes_all = any(x.kind == x.VAR_KEYWORD for x in function.values())
    return {
        name: x
        for name, x in given.items()
        if name in function or (takes_all and name not in (other or ()))
    }


def update_params(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any, Any]:
    """`tx.update` and `apply_updates`: the new parameters and state, and the updates.

    An optimiser of rows is asked to add its updates itself. Where it does not know the
    argument, or something around it computes with updates, that raises, and it is asked
    for ordinary ones.
    """

    def updated(**asked: Any) -> tuple[Any, Any, Any]:
        update: Any = tx.update
        updates, new = update(grads, state, params, **extra, **asked)
        if any(isinstance(x, Added) for x in jax.tree.leaves(new)):
            raise TypeError("A state keeps updates, which are to be arrays.")
        return apply_updates(params, updates), new, updates

    if _sparse_leaves(grads):
        with contextlib.suppress(Exception):
            return updated(**{ADDS: True})
    return updated()


def _sparse_leaves(grads: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(grads, is_leaf=is_bcoo) if is_bcoo(x)]


def _apply(apply: Callable[[Any], Any], grads: Any) -> tuple[Any, Any]:
    """The gradients in the form that `apply` takes, and its results.

    Whether a transformation takes row-sparse gradients is found out by calling it. One
    that chooses between updates and gradients, by `lax.cond`, takes those whose
    duplicates are added up, which have the structure of their updates.
    """
    try:
        return grads, apply(grads)
    except Exception as error:
        if not _sparse_leaves(grads):
            raise
        reason = error
    try:
        summed = jax.tree.map(
            lambda x: coalesce(x) if is_bcoo(x) else x, grads, is_leaf=is_bcoo
        )
        return summed, apply(summed)
    except Exception:
        pass
    dense = jax.tree.map(_dense_like, grads, is_leaf=is_bcoo)
    try:
        jax.eval_shape(apply, dense)
    except Exception:
        raise reason from None
    raise TypeError(f"{_DENSE_ONLY}It raised: {reason}") from reason


def _dense_like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, BCOO) else x


def _computes_indices(function: Callable[[Any], Any], grads: Any) -> bool:
    """Whether updates have canaries that were computed, which would become NaN."""
    canaries = jax.make_jaxpr(
        lambda grads: [
            x.canary for x in _sparse_leaves(function(grads)) if is_unseen(x)
        ]
    )(grads)
    makers = {id(x): eqn for eqn in canaries.eqns for x in eqn.outvars}
    todo, seen = [*canaries.jaxpr.outvars], set[int]()
    while todo:
        eqn = makers.get(id(todo.pop()))
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        inner = eqn.params.get("jaxpr")
        names = {x.primitive.name for x in getattr(inner, "eqns", ())}
        if not _ARITHMETIC.isdisjoint({eqn.primitive.name, *names}):
            return True
        todo += eqn.invars
    return False


def _is_read(function: Callable[[Any], Any], value: Any) -> bool:
    """Whether a function computes anything of the arrays of a value."""
    jaxpr = jax.make_jaxpr(function)(value).jaxpr
    read = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var)}
    return not read.isdisjoint(jaxpr.invars)
