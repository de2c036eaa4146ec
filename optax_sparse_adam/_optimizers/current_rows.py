"""What reads parameters in front of `exact_adam`: rows of now, or a refusal.

Not the lookups of a loss, which `_rows/source.py` brings up to date.

In `optax.chain(lazy(f), exact_adam(0.1))` all parts get the same parameters, and these
hold the projected final value of each row: 1.0, 0.399, 0.153 where the row is at 1.0,
0.9, 0.8.

- A gradient that was made with `read=` brings with it what its rows were read by
  (`read_of`), and `lazy` brings the rows of the parameter up to date by the same.
  Where that is lost, as between two programs, it refuses an `f` that reads parameters.
- A part that is not in `lazy` reads a table as it is. Where the package calls the
  optimiser, the jaxpr of the update tells (`refuse_stored_reads`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from .._jax_extras.jaxprs import FlatJaxpr
from .._rows.checks import is_leaf
from .._rows.clocks import is_read_up_to_date
from .._rows.entries import Rows
from .._rows.gather_scatter import order_after_read, take_rows
from .._rows.padding import mask_padding
from .._rows.stale import STORED
from .attempt import attempt
from .lazy_leaves import Leaves, OfTable
from .update_fn import RowUpdateFn


def read_stale_params(
    update: Callable[[Leaves[Any]], Leaves[Any]],
    leaves: Leaves[Any],
    places: Sequence[int],
) -> set[int]:
    """Of which tables an update reads the parameter, whose rows must be of now.

    Args:
      update: The dense update of all leaves.
      leaves: Gradients, state and parameters.
      places: The tables, by their places among the gradients.
    """
    params = {
        i: leaves.params[i]
        for i in places
        if leaves.params[i] is not None and is_read_up_to_date(leaves.grads[i])
    }
    if not params:
        return set()
    grads = {i: leaves.grads[i] for i in places}
    shapes = {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in grads.items()}

    def of_tables(grads: dict[int, Any], params: dict[int, Any]) -> Leaves[Any]:
        return update(
            leaves._replace(
                grads=[grads.get(i, x) for i, x in enumerate(leaves.grads)],
                params=[params.get(i, x) for i, x in enumerate(leaves.params)],
            )
        )

    closed, error = attempt(jax.make_jaxpr(of_tables), shapes, params)
    if error is not None or closed.effects:  # as a print, of whatever it is
        return {*params}
    program = FlatJaxpr(closed)
    starts = {*program.slice(program.outputs)[1]}
    pairs = zip(params, program.inputs[len(grads) :], strict=True)
    return {i for i, value_id in pairs if value_id in starts}


def with_current_rows(
    table: OfTable[Any], rows: Rows, olds: OfTable[Any]
) -> tuple[Rows, OfTable[Any]]:
    """The touched rows of a table, with those of the parameter as they are now.

    Whatever is written at their indices is written after this.

    Raises:
      ValueError: If it is not known any more what they hold.
    """
    grad, param = table.grad, jnp.asarray(table.param)
    shape = jnp.shape(param)
    source = next((x for x in grad.read_of if jnp.shape(x.array) == shape), None)
    if source is None:
        raise ValueError(
            "lazy got rows of exact_adam, which parameters hold by their projected "
            "values, and what is inside of it reads them; the gradient (of shape "
            f"{grad.shape}) does not know any more how to bring them up to date. Call "
            "value_and_grad(loss, read=state) and update in one program, as in "
            "make_train_step, or flax_nnx.update, with no jit, vmap, cond, scan or "
            "function of trees between them (`+` adds gradients up), and put lazy in "
            "front of exact_adam."
        )
    take = functools.partial(take_rows, indices=rows.indices)
    values = source._replace(array=param).values(take)
    values = mask_padding(values, rows.indices, shape)
    indices = order_after_read(values, rows.indices)
    return rows._replace(indices=indices), olds._replace(param=values)


def refuse_stored_reads(
    program: ClosedJaxpr, params: Any, grads: Any, name: str
) -> None:
    """Raises where an update reads a table that `exact_adam` trains, all of it.

    Args:
      program: The update, of these very parameters, which are constants of it.
      params: The parameters.
      grads: Their gradients.
      name: The function that the user called.

    Raises:
      ValueError: If anything reads one but what is named by `knows_stored_rows`.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_leaf)
    pairs = zip(leaves, treedef.flatten_up_to(params), strict=True)
    tables = {id(param) for grad, param in pairs if is_read_up_to_date(grad)}
    consts = zip(program.jaxpr.constvars, program.consts, strict=True)
    variables = {var for var, value in consts if id(value) in tables}
    for eqn, line in _readers(program.jaxpr, variables):
        raise ValueError(
            f"{name} was given an optimiser that reads a table that exact_adam trains, "
            f"by `{eqn.primitive}` at {line}. Between two steps the table holds "
            "projected values, not those of now. Put what reads the rows of the batch "
            "inside lazy, in front of exact_adam: there it gets values of now. What "
            "reads whole tables belongs outside of the optimiser: "
            "osa.evaluate(function, read=state)(params)."
        )


def without_stored_reads(
    name: str, tx: Any, update: Callable[[Any], Any], params: Any, grads: Any
) -> Any:
    """`update(grads)`, by `tx`, if no part of it reads tables as `exact_adam` has them.

    That is seen in its program, which is traced for it; in a program it is then used.
    """
    leaves = jax.tree.leaves(grads, is_leaf=is_leaf)
    if type(tx.update) is RowUpdateFn or not any(map(is_read_up_to_date, leaves)):
        return update(grads)
    program, shapes = jax.make_jaxpr(lambda: update(grads), return_shape=True)()
    refuse_stored_reads(program, params, grads, name)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
        return update(grads)  # what is wrong with values raises there
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)())


def refuse_stored_rows(grad: Any, rule: str, name: str) -> None:
    """Raises where an optimiser of rows would read those that `exact_adam` trains."""
    if is_read_up_to_date(grad):
        raise ValueError(
            f"{rule}, and those of exact_adam hold projected values between two steps: "
            f"{name} cannot train a table that exact_adam trains. Train each table by "
            "one of them, by optax.partition."
        )


def _readers(
    jaxpr: Jaxpr, variables: set[Any], around: str = ""
) -> Iterator[tuple[JaxprEqn, str]]:
    """What reads one of these, but does not know stored rows; and its line."""
    for eqn in jaxpr.eqns:
        mine = [isinstance(x, Var) and x in variables for x in eqn.invars]
        if not any(mine) or STORED in str(eqn.source_info.name_stack):
            continue
        line = source_info_util.summarize(eqn.source_info) or around
        bodies = [] if eqn.primitive.name == "while" else [*_bodies(eqn)]
        if not bodies:
            yield eqn, line
        for body in bodies:
            # Operands of a branch are behind its index, all others are like those here.
            of_body = zip(reversed(body.invars), reversed(mine), strict=False)
            yield from _readers(body, {x for x, is_mine in of_body if is_mine}, line)


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    params: Sequence[Any] = jax.tree.leaves([*eqn.params.values()])
    for x in params:
        if isinstance(x, ClosedJaxpr):
            yield x.jaxpr
        elif isinstance(x, Jaxpr):
            yield x
