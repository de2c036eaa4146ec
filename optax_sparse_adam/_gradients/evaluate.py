"""`evaluate`: a function of parameters, whose lookups read rows up to date."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._rows.source import Source
from .arguments import check_argnums
from .expressions import as_jax, is_array, table
from .nested_reads import reading
from .rules import RULES
from .tracing import as_passed, as_places, jit_enabled, trace
from .value_and_grad import current_tables
from .walk import Program, Walk

Result = TypeVar("Result")


def evaluate(
    fun: Callable[..., Result], argnums: int | Sequence[int] = 0, *, read: Any = None
) -> Callable[..., Result]:
    """`fun`, for evaluation and serving: lookups read rows as they are now, and fast.

    With `read=state`, a lookup gives each row as dense Adam would have it now, as in
    `value_and_grad(..., read=state)`; any other use sees the whole table brought up to
    date, at the cost of a pass over it. Nothing is written. The state of another
    optimiser changes nothing, and may be left out: the results are those of `fun`, but
    on a CPU lookups go through the kernel where it is faster.

    Call it inside of `jax.jit`; outside, each call traces `fun` again. Its derivatives
    are dense; `value_and_grad` gives row-sparse ones.

    Args:
      fun: Any function that JAX can trace.
      argnums: Which positional argument or arguments hold the parameters.
      read: The state of the optimiser of these parameters, whichever it is.

    Returns:
      A function with the arguments and results of `fun`.

    Raises:
      ValueError: By the returned function, if `read` is seen to be no state of an
        optimiser, or that of other parameters, or if parameters are not passed by
        position.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, tx = jnp.ones((1000, 4)), osa.exact_adam(0.1)
      >>> state = tx.init(table)
      >>> predict = lambda t, ids: jnp.sum(t[ids], axis=1)
      >>> loss = lambda t, ids: jnp.sum(predict(t, ids) ** 2)
      >>> step = osa.make_train_step(loss, tx)
      >>> table, state, _ = step(table, state, jnp.array([3, 7]))
      >>> evaluation = jax.jit(lambda t, s, ids: osa.evaluate(predict, read=s)(t, ids))
      >>> [round(x, 4) for x in evaluation(table, state, jnp.array([3, 5])).tolist()]
      [3.6, 4.0]
    """
    check_argnums(argnums)

    @functools.wraps(fun)
    def evaluation(*args: Any, **kwargs: Any) -> Result:
        places = as_places(argnums)
        if not all(-len(args) <= place < len(args) for place in places):
            raise ValueError(
                "`evaluate` reads arguments that are passed by position, got "
                f"argnums={argnums} for {len(args)} of them. Pass the parameters by "
                "position, or bind the others with functools.partial."
            )
        chosen = [args[place] for place in places]

        def bound(*args: Any) -> Any:
            with reading([args[i] for i in places], chosen, read):
                return fun(*args, **kwargs)

        tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        with jit_enabled():
            closed, to_result, are_stored = trace(bound, args, places)
            values = [_looked_up(x) for x in current_tables(tree, read)]
            walk = Walk(Program(RULES), iter(()))  # no deltas: nothing has a derivative
            results = walk.evaluate(closed, values)
            arrays = [*map(as_jax, map(walk.result, results, are_stored))]
        arrays = as_passed(closed, jax.tree.leaves(tree), arrays, are_stored)
        result: Result = to_result(arrays)
        return result

    return evaluation


def _looked_up(source: Source) -> Any:
    """An expression, or the array as it is now where nothing can be looked up."""
    array = source.array
    if not is_array(array):
        return array
    if jnp.ndim(array) and jnp.issubdtype(jnp.result_type(array), jnp.floating):
        return table(source)
    return array if source.stale is None else source.values(lambda x: x)
