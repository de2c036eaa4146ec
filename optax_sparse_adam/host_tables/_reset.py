"""`HostTrainer.reset_rows`: rows begun again, such as those of new keys."""

from typing import Any

import jax
import numpy as np

from .._row_verbs import reset_rows
from ._pipeline import Pipeline


def reset(steps: Pipeline, ids: Any, rows: Any) -> None:
    """Takes the rows out, begins them by `reset_rows` on these alone, stores them."""
    plan = steps.plan
    structure: Any = plan.treedef
    like = structure.unflatten(range(structure.num_leaves))
    try:
        each = jax.tree.map(
            lambda x, part: jax.tree.map(lambda _: x, part),
            *(ids, like),
            is_leaf=lambda x: x is None,
        )
    except ValueError as error:
        raise ValueError(
            "reset_rows needs ids in a tree that is a prefix of the parameters': an "
            f"array for each HostTable, and None for what is left: {error}"
        ) from None
    of_leaves = structure.flatten_up_to(each)
    kept: list[np.ndarray] = []
    places: list[Any] = [None] * structure.num_leaves
    for i, given in enumerate(of_leaves):
        if i not in plan.tables:
            if given is not None:
                raise ValueError(
                    f"HostTrainer.reset_rows resets rows of HostTables, got ids for "
                    f"leaf {i} of the parameters, which is none. Put None there."
                )
            continue
        own = np.zeros(0, np.int32) if given is None else np.asarray(given)
        inside = (own >= 0) & (own < plan.tables[i].shape[0])
        kept.append(own[inside])
        if len(np.unique(kept[-1])) < len(kept[-1]):
            raise ValueError(
                f"reset_rows needs ids that name each row once, got one of "
                f"{plan.tables[i].name} several times. Call np.unique(ids)."
            )
        if given is not None:
            place: Any = np.full(len(own), -1, np.int32)
            place[inside] = np.arange(len(kept[-1]))
            places[i] = place
    sizes = [len(x) for x in places if x is not None]
    if not any(len(x) for x in kept):
        return
    steps.settle()
    words = steps.take(kept, max(sizes))
    few = plan.of_records(steps.dense, steps.rest, words)
    new = reset_rows(plan.tx, *few, structure.unflatten(places), rows)
    records = zip(plan.to_records(*new)[2], kept, strict=True)
    steps.version += 1
    steps.store(kept, [np.asarray(x)[: len(own)] for x, own in records])
