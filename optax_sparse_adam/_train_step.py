"""`make_train_step`: gradient, update and addition as one compiled, donated step."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax

from ._gradients.marks import Sparse
from ._gradients.value_and_grad import value_and_grad
from ._optimizers.attempt import attempt
from ._optimizers.current_rows import refuse_stored_reads, without_stored_reads
from ._optimizers.forms import (
    UpdateProgram,
    applied,
    first_that_traces,
    sparse_leaves,
    traced,
)
from ._optimizers.hyperparameters import check_transformation
from ._optimizers.update_fn import RowUpdateFn
from ._rows.apply_updates import apply_updates
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

    A kernel adds updates of float32 tables while it computes them, with the same bits,
    where `tx` is an optimiser of this package as it was made. Whatever is around it, as
    a chain or a wrapper of your own, sees the updates.

    Gradients are row-sparse wherever possible. Their duplicates are added up first for
    an optimiser that needs it, such as `optax.apply_if_finite`. An optimiser that takes
    dense gradients only, such as `optax.adam(1e-3)`, is refused: `exact_adam(1e-3)` has
    its numbers, `lazy(optax.adam(1e-3))` updates the rows of the batch only, and
    `sparse=False` makes dense gradients, at the cost of whole tables.

    Which of these forms `tx` takes is found out while tracing. What `tx` does when the
    program runs, as a `jax.debug.print`, is in it once. Its Python code runs once for
    each program that is compiled; twice where duplicates are added up first, and three
    times before a refusal. That is what `tx` has raised of the gradients as they are,
    with a note (PEP 678) if it would take dense ones.

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
      TypeError: If `tx` is no transformation; by the step, for a keyword that nobody
        reads. The step raises what its parts raise.

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
        for_loss = _taken_by(of_loss, keywords, other=of_tx)
        for_tx = _taken_by(of_tx, keywords, other=of_loss)
        read = state if contains_stale(state) else None
        both = value_and_grad(loss, has_aux=has_aux, sparse=sparse, read=read)
        value, grads = both(params, *batch, **for_loss)

        def value_fn(params: Any, **_: Any) -> Any:
            value = loss(params, *batch, **for_loss)
            return value[0] if has_aux else value

        def update(grads: Any, of_nobody: dict[str, Any]) -> Any:
            # What line searches and plateau schedules of optax take.
            extra = {"value": value[0] if has_aux else value}
            if read is None and not sparse_leaves(grads):
                extra |= {"grad": grads, "value_fn": value_fn}
            extra = _taken_by(of_tx, extra) | for_tx | of_nobody
            return update_params(tx, grads, state, params, **extra)

        # Those that the loss does not take: the optimiser has to read them.
        names = keywords.keys() - for_loss.keys()
        asked = {name: for_tx[name] for name in names if name in for_tx}
        if not names and type(tx.update) is RowUpdateFn:  # it takes them as they are
            return *update(grads, {}), value
        config: Any = jax.config  # not all of it has types in every version
        operands = "make_train_step", update, grads, asked
        program: Any
        if config.jax_disable_jit:  # what is around an optimiser runs as Python does
            results = applied(*operands)
            asks = names or read is not None  # else it would be called for nothing
            program = attempt(traced, *operands[1:])[0] if asks else None
        else:
            program = first_that_traces(*operands)
        if program is not None:
            refuse_stored_reads(program.jaxpr, params, grads, operands[0])
            _check_are_read(names, program)
        if not config.jax_disable_jit:
            results = program(asked)
        return *results, value

    return step


def extra_args_of(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    value: Any,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """What `tx.update` gets beside its three arguments where gradients are sparse."""
    of_loss, of_tx = _keywords(loss), _keywords(tx.update, skip=3)
    extra = _taken_by(of_tx, {"value": value})
    return extra | _taken_by(of_tx, keywords, other=of_loss)


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
    function: Keywords, keywords: dict[str, Any], other: Keywords | None = None
) -> dict[str, Any]:
    """Those keywords that a function names; and if it has `**`, those of nobody."""
    takes_all = any(x.kind == x.VAR_KEYWORD for x in function.values())
    return {
        name: x
        for name, x in keywords.items()
        if name in function or (takes_all and name not in (other or ()))
    }


def _check_are_read(names: Iterable[str], program: UpdateProgram) -> None:
    for name in names:
        if not program.reads(name):
            raise TypeError(
                "Arguments of a training step by keyword go to the loss, if it has "
                f"them, and to the optimiser; got `{name}`, which neither reads."
            )


def update_params(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """`tx.update` and `apply_updates`: the new parameters and state.

    An optimiser of rows adds its updates itself, where nothing is around it that could
    see them.
    """
    update: Any = tx.update
    if type(update) is RowUpdateFn:
        new_params, new_state = update.add_to_params(grads, state, params, **extra)
    else:
        updates, new_state = update(grads, state, params, **extra)
        new_params = apply_updates(params, updates)
    return new_params, new_state


def params_at_once(
    name: str,
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any]:
    """`update_params`, where `make_train_step` has made neither gradients nor program.

    Args:
      name: The function that the user called.
      tx: The optimiser.
      grads: The gradients.
      state: The state.
      params: The parameters.
      **extra: What `tx.update` takes besides.

    Raises:
      ValueError: If a part of `tx` reads a table that `exact_adam` trains.
    """

    def update(grads: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        return update_params(tx, grads, state, params, **extra)

    if type(tx.update) is RowUpdateFn:  # it takes them as they are
        return update(grads, extra)

    def of_grads(grads: Any) -> Any:
        return applied(name, update, grads, extra)

    results: tuple[Any, Any] = without_stored_reads(name, tx, of_grads, params, grads)
    return results
