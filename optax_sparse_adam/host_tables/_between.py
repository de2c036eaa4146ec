"""What is done with rows between two steps: read, changed by chunks, begun again.

A part of a table with its state is a table like others, so what there is for tables in
memory does it: `evaluate`, any function of parameters and state, `reset_rows`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._gradients.evaluate import evaluate
from .._row_tables import refuse_repeated, tables_of
from .._row_verbs import reset_rows
from .._rows.stale import contains_stale
from ._ids import RowIds, kept_arguments, split_keywords
from ._pipeline import Pipeline
from ._plan import CHUNK, compact, place
from ._records import WORD


def evaluated(steps: Pipeline, fun: Callable[..., Any]) -> Callable[..., Any]:
    """See `HostTrainer.evaluate`."""
    plan, few = steps.plan, compact(fun, steps.params)
    ids = RowIds(fun, plan.tables, plan.treedef)

    def on_rows(static: Any, others: Any, words: Any, rows: Any, args: Any) -> Any:
        params, state = plan.of_records(others, words)
        bound = evaluate(few, read=state if contains_stale(state) else None)
        batch, keywords = args
        return bound(params, rows, *batch, **keywords, **dict(static))

    program = jax.jit(on_rows, static_argnums=0)

    def on_tables(*args: Any, **keywords: Any) -> Any:
        with steps.alone():
            steps.check()
            steps.settle()
            traced, static = split_keywords(fun, keywords)
            given = args, traced
            rows = steps.fetch(ids(steps.dense, given, static, "The batch of evaluate"))
            words = [*map(place, rows.words, rows.padded)]
            named = tuple(sorted(static.items()))
            return program(named, steps.others, words, rows.padded, given)

    return on_tables


def map_rows(steps: Pipeline, function: Callable[[Any, Any], Any]) -> None:
    """See `HostTrainer.map_rows`."""
    steps.check(changes=True)
    steps.settle()
    plan = steps.plan
    most = max(x.shape[0] for x in plan.tables.values())
    words = max(layout.words for layout in plan.layouts)
    size = min(most, max(1, CHUNK // (words * WORD)))
    shapes = [jax.ShapeDtypeStruct((size, x.words), jnp.uint32) for x in plan.layouts]

    def mapped(words: Any, others: Any) -> Any:
        return plan.to_records(*function(*plan.of_records(others, words)))

    def new_others(*leaves: Any) -> Any:
        return mapped(leaves[: len(shapes)], leaves[len(shapes) :])[0]

    trees = jax.eval_shape(plan.of_records, steps.others, shapes)
    if jax.eval_shape(function, *trees) != trees:
        raise ValueError(
            "map_rows needs a function that returns parameters and state in the "
            "shapes and types that it gets."
        )
    if any(i < len(shapes) for i in kept_arguments(new_others, shapes + steps.others)):
        raise ValueError(
            "map_rows needs a function that treats each row alone; in the result of "
            "this one, arrays that are no rows depend on rows, of which it sees some "
            "at a time."
        )
    program, others = jax.jit(mapped), steps.others
    steps.version += 1
    for first in range(0, most, size):
        rows = [
            np.arange(first, min(first + size, x.shape[0]))
            for x in plan.tables.values()
        ]
        others, new = program(steps.take(rows, size), steps.others)
        steps.store(rows, new)
    steps.others = others


def reset(steps: Pipeline, ids: Any, rows: Any) -> None:
    """See `HostTrainer.reset_rows`: it is `reset_rows` of these rows alone."""
    steps.check(changes=True)
    plan: Any = steps.plan
    found = tables_of("reset_rows", steps.params, ids)
    refuse_repeated(found)
    kept: list[np.ndarray] = []
    places: list[Any] = [None] * len(found)
    for i, table in enumerate(found):
        if i in plan.tables:
            own = np.zeros(0, np.int32) if table is None else np.asarray(table.ids)
            inside = (own >= 0) & (own < plan.tables[i].shape[0])
            kept.append(own[inside])
            if table is not None:
                places[i] = np.where(inside, np.cumsum(inside) - 1, -1)
        elif table is not None:
            raise ValueError(
                "HostTrainer.reset_rows resets rows of HostTables, got ids for "
                f"{table.path} of the parameters, which is none. Put None there."
            )
    if not any(len(x) for x in kept):
        return
    steps.settle()
    size = max(len(x) for x in places if x is not None)
    params, state = plan.of_records(steps.others, steps.take(kept, size))
    of_few = plan.treedef.unflatten(places)
    params, state = reset_rows(plan.tx, params, state, of_few, rows)
    steps.version += 1
    steps.store(kept, plan.to_records(params, state)[1])
