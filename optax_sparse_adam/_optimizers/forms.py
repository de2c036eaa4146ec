"""In which form an update takes row-sparse gradients: asked by tracing it.

An optimiser of rows takes them as they are. One that chooses between updates and
gradients by `lax.cond`, as `optax.apply_if_finite` does, takes those whose duplicates
are added up, which have the structure of their updates. What maps over all arrays, as
`optax.scale` does, takes neither: `armed` gradients raise then. Nothing but a
call tells which, and what is raised may as well be the user's own fault. So it stays as
it is, and gets a note (PEP 678) if another form would be taken.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from .._rows.armed import armed, disarmed
from .._rows.checks import is_bcoo
from .._rows.coalesce import coalesce
from .attempt import attempt

_DENSE_ONLY = (
    "Put the optimiser, or the part of it that is refused, inside lazy, to update the "
    "rows of the batch only: lazy(optax.adam(1e-3)), lazy(optax.chain(...)), or "
    "optax.chain(lazy(optax.clip_by_global_norm(1.0)), sparse_adam(1e-3)). {name} "
    "gives row-sparse gradients to the optimiser, and this one, or a part of it, takes "
    "dense ones only: what maps over all arrays, as optax.scale does, would change "
    "their indices, too. For dense Adam's numbers take exact_adam or "
    "exact_adamw. Labels and masks that are functions see gradients; pass their "
    "trees: optax.partition(parts, labels(params)). In place of optax.MultiSteps, let "
    "one gradient span the micro-batches, by a lax.scan in the loss. A dense parameter "
    "that the loss does not use has a row-sparse gradient, too: name the tables by "
    "sparse=. For dense gradients, at the tables' price, pass sparse=False."
)
_SUMMED_ONLY = (
    "{name} gives row-sparse gradients to the optimiser as they are, and this one, or "
    "a part of it, takes those whose duplicates are added up, which have the structure "
    "of their updates: pass osa.coalesce of each of them."
)


UpdateFn = Callable[[Any, dict[str, Any]], Any]


def sparse_leaves(tree: Any) -> list[Any]:
    """The row-sparse gradients of a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_bcoo) if is_bcoo(x)]


def _summed(grads: Any) -> Any:
    def of_leaf(x: Any) -> Any:
        return coalesce(x) if is_bcoo(x) else x

    return jax.tree.map(of_leaf, grads, is_leaf=is_bcoo)


def _dense(grads: Any) -> Any:
    """Shapes of dense gradients: nothing of the size of a table is made."""

    def of_leaf(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_bcoo(x) else x

    return jax.tree.map(of_leaf, grads, is_leaf=is_bcoo)


class UpdateProgram(NamedTuple):
    """An update as a program of its own, of the keywords that are asked about.

    It is evaluated where it is known to be right: a trace that fails leaves nothing
    there, and effects happen once.

    Attributes:
      jaxpr: The update.
      results: The structure of its results.
      names: For each of its arguments the keyword that it is a part of.
    """

    jaxpr: ClosedJaxpr
    results: Any
    names: list[str]

    def __call__(self, keywords: dict[str, Any]) -> Any:
        leaves = jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(keywords))
        return self.results.unflatten(leaves)

    def reads(self, name: str) -> bool:
        """Whether anything is computed of a keyword, or returned."""
        jaxpr = self.jaxpr.jaxpr
        used = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var)}
        used |= {x for x in jaxpr.outvars if isinstance(x, Var)}
        pairs = zip(self.names, jaxpr.invars, strict=True)
        return any(var in used for of, var in pairs if of == name)


def traced(update: UpdateFn, grads: Any, keywords: dict[str, Any]) -> UpdateProgram:
    """`update(grads, keywords)`, of gradients that are armed."""

    def armed_update(keywords: dict[str, Any]) -> Any:
        return disarmed(update(armed(grads), keywords))

    jaxpr, results = jax.make_jaxpr(armed_update, return_shape=True)(keywords)
    names = [name for name in sorted(keywords) for _ in jax.tree.leaves(keywords[name])]
    return UpdateProgram(jaxpr, jax.tree.structure(results), names)


def first_that_traces(
    name: str, update: UpdateFn, grads: Any, keywords: dict[str, Any]
) -> UpdateProgram:
    """The update of gradients as they are, or with their duplicates added up.

    Args:
      name: The function that the user called.
      update: `update(grads, keywords)`.
      grads: The gradients.
      keywords: What else it takes, by name.

    Raises:
      Exception: What `update` raises of the gradients as they are.
    """
    program: UpdateProgram
    program, refusal = attempt(traced, update, grads, keywords)
    if refusal is None:
        return program
    if sparse_leaves(grads):
        program, error = attempt(lambda: traced(update, _summed(grads), keywords))
        if error is None:
            return program
        _explain(refusal, name, update, grads, keywords, ((_dense, _DENSE_ONLY),))
    raise refusal


def applied(name: str, update: UpdateFn, grads: Any, keywords: dict[str, Any]) -> Any:
    """`update(grads, keywords)` of gradients as they are, here and now.

    Raises:
      Exception: What `update` raises.
    """
    results, refusal = attempt(lambda: disarmed(update(armed(grads), keywords)))
    if refusal is None:
        return results
    forms = (_summed, _SUMMED_ONLY), (_dense, _DENSE_ONLY)
    _explain(refusal, name, update, grads, keywords, forms)
    raise refusal


def _explain(
    refusal: Exception,
    name: str,
    update: UpdateFn,
    grads: Any,
    keywords: dict[str, Any],
    forms: tuple[tuple[Callable[[Any], Any], str], ...],
) -> None:
    """Adds a note to what was raised, if gradients of another form would be taken."""

    def armed_update(grads: Any, keywords: dict[str, Any]) -> Any:
        return disarmed(update(armed(grads), keywords))

    def trace(form: Callable[[Any], Any]) -> None:
        jax.eval_shape(armed_update, form(grads), keywords)

    for form, words in forms if sparse_leaves(grads) else ():
        if attempt(trace, form)[1] is None:
            refusal.add_note(words.format(name=name))
            return
