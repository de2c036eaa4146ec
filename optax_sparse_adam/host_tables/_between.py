"""What is done with rows between two steps: read, changed by chunks, begun again.

A part of a table with its state is a table like others, so what there is for tables in
memory does it: `evaluate`, any function of parameters and state, `reset_rows`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._gradients.evaluate import evaluate
from .._jax_extras.jaxprs import FlatJaxpr
from .._rows.stale import contains_stale
from ._arguments import (
    as_arrays,
    check_function,
    refuse_program,
    split_keywords,
    type_of,
)
from ._by_row import names_rows, treats_rows_alone
from ._host_rows import NOT_FETCHED, HostRows
from ._ids import RowIds
from ._plan import compact
from ._program import Program
from ._records import CHUNK, WORD
from ._reset import reset_of
from ._store import Ascending, ascending


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _NoArray:
    """A part of a result that is no array of JAX, such as a string."""

    value: Any


def evaluated(
    host: HostRows, fun: Callable[..., Any], *, is_alone: bool = False
) -> Callable[..., Any]:
    """See `HostTrainer.evaluate`; `is_alone`: for who has waited for others before."""
    check_function(fun, "evaluate needs a function (params, *args)")
    plan, few = host.plan, compact(fun, host.plan.tables)
    ids = RowIds(fun, plan)

    def make() -> Any:
        def on_rows(static: Any, rest: Any, arrays: Any, rows: Any, args: Any) -> Any:
            params, state = plan.join(rest, arrays)
            bound = evaluate(few, read=state if contains_stale(state) else None)
            batch, keywords = as_arrays(args)
            result = bound(params, rows, *batch, **keywords, **dict(static))
            # It leaves the program in the structure of the result, as it is.
            return jax.tree.map(
                lambda x: x if isinstance(x, jax.Array) else _NoArray(x), result
            )

        return jax.jit(on_rows, static_argnums=0)

    program = Program(make)

    def on_tables(*args: Any, **keywords: Any) -> Any:
        with contextlib.nullcontext() if is_alone else host.access.alone(reads=True):
            host.check()
            host.refuse_narrow()
            host.settle()
            traced, static = split_keywords(fun, keywords)
            batch = args, traced
            asked = ids(host.rest, batch, static, "The batch of evaluate")
            rows = host.fetch(asked, host.sizes_of_reads)
            host.sizes_of_reads.update(rows.sizes)
            named = tuple(sorted(static.items()))
            result, looked_up = program(
                named, host.rest, rows.arrays, (rows.padded, rows.residuals), batch
            )
            if int(looked_up) != int(rows.fingerprint):
                raise RuntimeError(NOT_FETCHED.format(what="The function"))
            return jax.tree.map(
                lambda x: x.value if isinstance(x, _NoArray) else x,
                result,
                is_leaf=lambda x: isinstance(x, _NoArray),
            )

    return on_tables


def map_rows(host: HostRows, function: Callable[[Any, Any], Any]) -> None:
    """See `HostTrainer.map_rows`."""
    check_function(function, "map_rows needs a function (params, state)")
    host.check(changes=True)
    host.settle_before("map_rows")
    plan = host.plan
    parts = [x.partition for x in plan.tables.values()]
    most = max(x.block_rows for x in parts)
    words = sum(layout.words for layout in plan.layouts)
    size = min(most, max(1, CHUNK // (words * WORD)))
    length = size * plan.spread.blocks.size
    structure: Any = jax.tree.structure([[0 for _ in x.fields] for x in plan.layouts])

    def mapped(arrays: Any, rest: Any) -> Any:
        trees = plan.join(rest, arrays)
        return plan.split(*_in_the_types_of(trees, function(*trees)))

    def of_list(arrays: list[Any], rest: Any) -> Any:
        return mapped(structure.unflatten(arrays), rest)

    stays = _leaves_rows(host, of_list, length)
    if stays:  # only what has no rows changes, as numbers of the optimiser do
        size = most = min(size, 2)
    program, rest = jax.jit(mapped, **plan.spread.stays(host.rest)), host.rest
    with host.as_a_whole("map_rows") as store:
        for first in range(0, most, size):
            rows = [x.between(first, first + size) for x in parts]
            rest, arrays = program(host.take(rows, size), host.rest)
            refuse_program((rest, arrays), "map_rows")
            if not stays:
                store(rows, arrays)
        host.rest = rest


def _leaves_rows(
    host: HostRows, function: Callable[[list[Any], Any], Any], length: int
) -> bool:
    """Whether `function(arrays, rest)` returns the arrays of tables as they are.

    Refuses one that does not treat each row alone, of chunks of `length` rows.
    """
    plan, rest = host.plan, host.rest
    counts = [table.shape[0] for table in plan.tables.values()]
    pairs = [*zip(counts, plan.layouts, strict=True)]
    fields = [(count, x) for count, layout in pairs for x in layout.fields]
    number = len(fields)

    def arrays(size: Callable[[int], int]) -> list[jax.ShapeDtypeStruct]:
        shapes = [((size(count), *x.shape), x.dtype) for count, x in fields]
        return [jax.ShapeDtypeStruct(*each) for each in shapes]

    def program(size: Callable[[int], int]) -> FlatJaxpr:
        return FlatJaxpr(jax.make_jaxpr(function)(arrays(size), rest))

    in_memory = program(lambda count: count)
    refuse_program([*in_memory.consts.values()], "map_rows")
    # For each table a size of no other axis: larger than what a row has, and odd. Some
    # rows of each table are as many; all of them may not be, as a function of rows of
    # two tables would see in memory.
    least = max(1000, *counts, *(size for _, x in fields for size in x.shape)) | 1
    sizes = {n: least + 2 * k for k, n in enumerate(dict.fromkeys(counts), 1)}
    reason = None
    try:
        of_some = program(lambda _: length)
        of_all = program(sizes.__getitem__)
        is_alone = not names_rows(of_all, number, sizes.values())
        is_alone &= not names_rows(of_some, number)
        is_alone &= treats_rows_alone(function, arrays(lambda _: length), rest, length)
    except jax.errors.JAXTypeError:  # in a function that JAX traces
        raise
    except (TypeError, ValueError) as error:  # all rows it takes, and some it does not
        is_alone, reason = False, error
    if not is_alone:
        raise ValueError(
            "map_rows needs a function that treats each row alone: it sees some at a "
            "time. In the result of this one rows depend on other rows, on numbers of "
            "rows, on how many there are, or on an array of all rows (for some of them "
            "there is reset_rows), or arrays without rows depend on rows."
        ) from reason
    return of_some.outputs[-number:] == of_some.inputs[:number]


def _in_the_types_of(trees: Any, new_trees: Any) -> Any:
    """What a function of `map_rows` returns; Python's numbers as those before them.

    Not how they are laid out, which Explicit axes that are set say of results alone.
    """
    expected: Any = jax.tree.structure(trees)
    if (found := jax.tree.structure(new_trees)) != expected:
        raise ValueError(
            "map_rows needs a function that returns parameters and state, (params, "
            f"state), in the structure that it gets: {expected}; got {found}."
        )

    def as_before(path: Any, old: Any, new: Any) -> Any:
        (shape, dtype, is_weak), wanted = type_of(new), type_of(old)
        with jax.numpy_dtype_promotion("standard"):
            if is_weak > wanted[2] and jnp.result_type(new, old) == wanted[1]:
                new, dtype = jnp.asarray(new, wanted[1]), wanted[1]
        if (shape, dtype) != wanted[:2]:
            name = ("params", "state")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise ValueError(
                "map_rows needs a function that returns parameters and state in the "
                f"shapes and types that it gets, some rows at once: `{name}` is "
                f"{wanted[1]}{list(wanted[0])}, and it returns {dtype}{list(shape)}."
            )
        return new

    return jax.tree_util.tree_map_with_path(as_before, trees, new_trees)


def reset(host: HostRows, params: Any, ids: Any, values: Any) -> None:
    """See `HostTrainer.reset_rows`: it is `reset_rows` of these rows alone."""
    host.check(changes=True)
    asked = reset_of(host.plan, params, ids, values)
    rows: list[Ascending] = []
    places: list[Any] = []
    for numbers, table in zip(asked.rows, host.plan.tables.values(), strict=True):
        part = table.partition
        wanted = np.zeros(0, np.int32) if numbers is None else numbers
        # Of other processes there are none, and no padding.
        wanted = np.where(wanted < 0, -1, part.rows_here(np.maximum(wanted, 0)))
        rows.append(ascending(wanted, part.count))
        at = np.where(wanted < 0, -1, np.searchsorted(rows[-1], wanted))
        places.append(None if numbers is None else at.astype(np.int32))
    if not any(map(len, rows)):
        return
    host.settle_before("reset_rows")
    size = max(len(x) for x in places if x is not None)
    arrays = host.reset_program(*host.here(rows, size), places, asked.values)
    refuse_program(arrays, "reset_rows")
    host.change(rows, arrays)


def read_all(host: HostRows) -> tuple[Any, Any]:
    """Parameters and state: see `HostTrainer.params`."""
    with host.access.alone(reads=True):
        host.check()
        host.settle()
        pairs = zip(host.stores, host.plan.layouts, strict=True)
        fields = [store.fields(layout) for store, layout in pairs]
        return host.plan.join(map(_copied, host.rest), fields)


def _copied(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    # Of an array that is split over processes none has all.
    is_here = x.is_fully_addressable or x.is_fully_replicated
    return np.array(x) if is_here and not is_key else jnp.array(x)
