"""`make_train_step`: gradient, update and addition as one compiled, donated step."""

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from ._gradients.value_and_grad import Sparse, value_and_grad
from ._optimizers.attempt import attempt
from ._optimizers.current_rows import refuse_stored_reads
from ._optimizers.hyperparameters import check_transformation
from ._optimizers.update_rows import UpdateRows
from ._rows.apply_updates import apply_updates
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
    same bits, where `tx` is an optimiser of this package as it was made. Whatever is
    around it, as a chain or a wrapper of your own, sees the updates.

    Gradients are row-sparse wherever possible. Their duplicates are added up first for
    an optimiser that needs it, such as `optax.apply_if_finite`. An optimiser that takes
    dense gradients only, such as `optax.adam(1e-3)`, is refused: `exact_adam(1e-3)` has
    its numbers, `lazy(optax.adam(1e-3))` updates the rows of the batch only, and
    `sparse=False` makes dense gradients, at the cost of whole tables.

    Which of these forms `tx` takes is found out while tracing. What `tx` does when the
    program runs, as a `jax.debug.print`, is in it once. Its Python code runs once for
    each program that is compiled; twice where duplicates are added up first, and three
    times before a refusal. What it raises itself, by `raise`, is raised at once.

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

        def apply(grads: Any, asked: dict[str, Any]) -> Any:
            # What line searches and plateau schedules of optax take.
            extra = {"value": value[0] if has_aux else value}
            if read is None and not _sparse_leaves(grads):
                extra |= {"grad": grads, "value_fn": value_fn}
            extra = _taken_by(of_tx, extra) | given | asked
            new_params, new, updates = update_params(tx, grads, state, params, **extra)
            # An optimiser of rows returns unique ones, or makes a BCOO of its own.
            unseen = [x for x in _sparse_leaves(updates) if is_unseen(x)]
            is_unique = all(x.unique_indices for x in unseen)
            return (new_params, new), [] if is_unique else [x.canary for x in unseen]

        names = keywords.keys() - own.keys()
        config: Any = jax.config  # not all of it has types in every version
        # There is no program to ask; or an optimiser of rows, whose forms are known.
        if config.jax_disable_jit or (type(tx.update) is UpdateRows and not names):
            return *apply(grads, {})[0], value
        asked = {name: given[name] for name in names if name in given}
        traced = _traced(apply, grads, asked)
        if _are_computed(traced):
            words = _DENSE_ONLY.format(name="make_train_step")
            raise TypeError(words + "It would scale indices with the values.")
        refuse_stored_reads(traced.jaxpr, params, grads, "make_train_step")
        for name in names:
            if not _is_read(traced, name):
                raise TypeError(
                    "Arguments of a training step by keyword go to the loss, if it has "
                    f"them, and to the optimiser; got `{name}`, which neither reads."
                )
        return *_evaluated(traced, asked), value

    return step


_DENSE_ONLY = (
    "{name} gives row-sparse gradients to the optimiser, and this one, or a "
    "part of it, takes dense ones only. For dense Adam's numbers take exact_adam or "
    "exact_adamw. To update the rows of the batch only, put that part inside lazy: "
    "lazy(optax.adam(1e-3)), or optax.chain(lazy(optax.clip_by_global_norm(1.0)), "
    "sparse_adam(1e-3)). Labels and masks that are functions see gradients; pass their "
    "trees: optax.partition(parts, labels(params)). In place of optax.MultiSteps, let "
    "one gradient span the micro-batches, by a lax.scan in the loss. For dense "
    "gradients, at the tables' price, pass sparse=False. "
)
_SUMMED_ONLY = (
    "{name} gives row-sparse gradients to the optimiser as they are, and this one, or "
    "a part of it, takes those whose duplicates are added up, which have the structure "
    "of their updates: pass osa.coalesce of each of them. "
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

    An optimiser of rows adds its updates itself, where nothing is around it that could
    see them; there are none then.
    """
    update: Any = tx.update
    if type(update) is UpdateRows:
        return *update.add_to_params(grads, state, params, **extra), None
    updates, state = update(grads, state, params, **extra)
    return apply_updates(params, updates), state, updates


def _sparse_leaves(grads: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(grads, is_leaf=is_bcoo) if is_bcoo(x)]


class _Traced(NamedTuple):
    """An update as a program of its own, of the keywords that are asked about.

    It is evaluated in the step when it is known to be right: an attempt that fails
    leaves nothing there, and effects are in the step once.

    Attributes:
      jaxpr: Its results are those of `apply`: parameters and state, then canaries.
      results: The structure of the parameters and the state.
      names: For each of its arguments the keyword that it is a part of.
    """

    jaxpr: ClosedJaxpr
    results: Any
    names: list[str]


def _traced(
    apply: Callable[[Any, Any], Any], grads: Any, asked: dict[str, Any]
) -> _Traced:
    """Traces `apply(grads, asked)`, of gradients in the form that it takes.

    Whether a transformation takes row-sparse gradients is found out by calling it. One
    that chooses between updates and gradients, by `lax.cond`, takes those whose
    duplicates are added up, which have the structure of their updates.
    """

    def trace(grads: Any) -> _Traced:
        function = functools.partial(apply, grads)
        jaxpr, (results, _) = jax.make_jaxpr(function, return_shape=True)(asked)
        names = [name for name in sorted(asked) for _ in jax.tree.leaves(asked[name])]
        return _Traced(jaxpr, jax.tree.structure(results), names)

    found, error = attempt(trace, grads)
    if error is None:
        return found
    if not _sparse_leaves(grads) or _is_raised_by_user(error.__traceback__):
        raise error
    summed = functools.partial(jax.tree.map, _summed, is_leaf=is_bcoo)
    found, other = attempt(lambda: trace(summed(grads)))
    if other is None:
        return found
    with refused_by_form("make_train_step", apply, grads, asked, is_step=True):
        raise error


@contextlib.contextmanager
def refused_by_form(
    name: str,
    update: Callable[..., Any],
    grads: Any,
    *args: Any,
    is_step: bool = False,
) -> Iterator[None]:
    """What is raised for row-sparse gradients says so, where others would be taken.

    What a user raises is left as it is, and so is what `exact_adam` raises of gradients
    without `read=`: while it is traced it takes dense ones.

    Args:
      name: The function that the user called.
      update: `update(grads, *args)`, which is traced with gradients of other forms.
      grads: The gradients.
      *args: What else it takes.
      is_step: Whether it is called by `make_train_step`, which has tried gradients
        whose duplicates are added up. Elsewhere what this package raises of indices
        that were changed is left as it is, too.
    """
    try:
        yield
    except Exception as error:
        of_user = _is_raised_by_user(error.__traceback__)
        module = _raised_in(error.__traceback__)
        ours = _KNOWS_FORMS if is_step else "optax_sparse_adam"
        of_us = module.startswith(ours)
        if of_user or of_us or not _sparse_leaves(grads):
            raise
        forms = () if is_step else ((_summed, _SUMMED_ONLY),)
        for form, words in (*forms, (_dense_like, _DENSE_ONLY)):
            other = jax.tree.map(form, grads, is_leaf=is_bcoo)
            if attempt(jax.eval_shape, update, other, *args)[1] is None:
                words = words.format(name=name)
                raise TypeError(f"{words}It raised: {error}") from error
        raise


def _evaluated(traced: _Traced, asked: dict[str, Any]) -> Any:
    """The parameters and the state, by the program in which this is called."""
    leaves = jaxpr_as_fun(traced.jaxpr)(*jax.tree.leaves(asked))
    return traced.results.unflatten(leaves[: traced.results.num_leaves])


def _summed(x: Any) -> Any:
    return coalesce(x) if is_bcoo(x) else x


def _dense_like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_bcoo(x) else x


def _is_raised_by_user(traceback: TracebackType | None) -> bool:
    """Whether an error comes of a `raise` or an `assert` of the user's own.

    What JAX and optax raise, and what Python raises where an operation fails, may come
    of the form of the gradients.
    """
    return _raised_in(traceback).partition(".")[0] not in ("", *_LIBRARIES)


def _raised_in(traceback: TracebackType | None) -> str:
    """The module of a `raise` or an `assert`; empty where an operation has failed."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    code = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    if dis.opname[code] not in ("RAISE_VARARGS", "RERAISE"):
        return ""
    return str(traceback.tb_frame.f_globals.get("__name__", ""))


# Those whose errors are of other things than the form of gradients.
_KNOWS_FORMS = (
    "optax_sparse_adam._exact_adam",
    "optax_sparse_adam._optimizers.current_rows",
)
# Those whose errors may say that they do not know row-sparse gradients.
_LIBRARIES = {"jax", "jaxlib", "numpy", "optax", "flax", "optax_sparse_adam"}


def _are_computed(traced: _Traced) -> bool:
    """Whether updates have canaries that were computed, which would become NaN."""
    jaxpr = traced.jaxpr.jaxpr
    makers = {id(x): eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    todo, seen = jaxpr.outvars[traced.results.num_leaves :], set[int]()
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


def _is_read(traced: _Traced, name: str) -> bool:
    """Whether anything is computed of a keyword, or returned."""
    jaxpr = traced.jaxpr.jaxpr
    used = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var)}
    used |= {x for x in jaxpr.outvars if isinstance(x, Var)}
    own = zip(traced.names, jaxpr.invars, strict=True)
    return any(var in used for of, var in own if of == name)
