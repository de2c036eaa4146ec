"""Follows what has all rows of a table, and indices of rows, through an update.

In the program of `chain(average, sparse_adam)`, of a table of 1009 rows,

    b:f32[1009,4] = mul 0.9 a       a is all rows of the average: refused, with its line
    d:f32[1009,4] = jit[...] c ...  of this package: all rows, as they were in c
    e:f32[2,4] = gather c ids       rows of the batch, by the gradient's own indices

what is called by name below is let through; all else that takes rows or ids raises.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._jax_extras.jaxprs import name_and_params
from .._rows.stale import STORED

_MOVED = frozenset(["copy", "optimization_barrier", "sharding_constraint"])
_SHOWS = frozenset(["debug_callback", "debug_print"])
_MOVES = _MOVED | {
    *("reshape", "slice", "squeeze", "broadcast_in_dim", "transpose", "concatenate"),
    *("convert_element_type", "select_n", "gather", "dynamic_slice"),
    *("min", "max", "clamp"),
}
_COMPARED = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
_TURNED = str.maketrans("lg", "gl")  # 0 > ids for ids < 0
# What is called where it stands, with its operands in their order.
_CALLS = {
    **dict.fromkeys(["jit", "remat2"], "jaxpr"),
    **dict.fromkeys(["closed_call", "custom_jvp_call"], "call_jaxpr"),
    **{"custom_vjp_call": "call_jaxpr", "custom_vmap_call": "call", "cond": "branches"},
}


class AllRows(NamedTuple):
    """All rows of a table: those without a gradient are as they were in an array.

    Attributes:
      table: Its place among the parameters.
      leaf: Which array, or `None` where an optimiser of this package says so.
    """

    table: int
    leaf: int | None


class Ids(NamedTuple):
    """The indices of a gradient, or what a lookup makes of them.

    Attributes:
      table: Its place among the parameters.
    """

    table: int


class _Scratch(NamedTuple):
    """Zeros, say, into which something is written by such indices.

    Attributes:
      table: Its place among the parameters.
    """

    table: int


class _Number(NamedTuple):
    """A number of the program, as it is given to a function inside.

    Attributes:
      value: Which.
    """

    value: complex


Value = AllRows | Ids | _Scratch | _Number | None


class Needed(Exception):
    """More of a table than the rows of a batch, and why; or numbers of rows."""

    def __init__(self, table: int, why: str, *, numbers: bool = False):
        super().__init__(table, why)
        self.table, self.why, self.numbers = table, why, numbers


class RowFlow:
    """Follows what has all rows through a jaxpr.

    Args:
      sizes: How many rows each table has in it, another number than any other axis.

    Attributes:
      numbers: Those that it computes with, beside indices.
    """

    def __init__(self, sizes: dict[int, int]):
        self.sizes, self.numbers = sizes, list[str]()
        self._tables = {size: i for i, size in sizes.items()}

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Value], around: str) -> list[Value]:
        """What its results are, of arguments that are this; `around` is its line.

        Raises:
          Needed: If it takes all rows, or ids, otherwise than the module says.
        """
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return values.get(atom)
            number: Any = atom.val
            return None if np.ndim(number) else _Number(complex(number))

        for eqn in jaxpr.eqns:
            operands = [*map(of, eqn.invars)]
            results = self._results(eqn, operands, around)
            values.update(zip(eqn.outvars, results, strict=True))
        return [*map(of, jaxpr.outvars)]

    def _results(
        self, eqn: JaxprEqn, operands: list[Value], around: str
    ) -> Sequence[Value]:
        if STORED in str(eqn.source_info.name_stack):
            return self._of_ours(eqn, operands)
        name, params = name_and_params(eqn)
        line = source_info_util.summarize(eqn.source_info) or around
        rows = [x for x in operands if isinstance(x, AllRows)]
        ids = [x for x in operands if isinstance(x, Ids)]
        nothing: list[Value] = [None] * len(eqn.outvars)
        is_chosen = name == "cond" and isinstance(operands[0], AllRows | Ids)
        if name in _CALLS and not is_chosen:
            bodies = params.get("branches") or [params[_CALLS[name]]]
            of_body = operands[1:] if name == "cond" else operands
            made = [self.run(getattr(x, "jaxpr", x), of_body, line) for x in bodies]
            return [*map(_merged, zip(*made, strict=True))]
        if name in _SHOWS:
            return nothing
        if not rows and not ids:
            if name == "convert_element_type":
                return operands
            self.numbers += [str(x.value) for x in operands if isinstance(x, _Number)]
            return nothing
        if name in _MOVED and len(operands) == 1:
            return operands
        if not rows:
            results = self._of_ids(name, eqn, operands)
            if results is None:
                why = (
                    f"`{name}` at {line} computes with their numbers, which are others"
                )
                raise Needed(ids[0].table, why, numbers=True)
            return results
        cases = _merged(operands[1:])
        if name == "select_n" and isinstance(cases, AllRows) and not operands[0]:
            return [cases]
        first, *rest = operands
        if len(rows) == 1 and first in rows and Ids(rows[0].table) in rest[:1]:
            if name == "gather":
                return nothing
            if name.startswith("scatter"):
                return rows
        raise Needed(rows[0].table, f"`{name}` at {line} takes all, or its state's")

    def _of_ours(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Results of an optimiser of ours: a table is known by its size.

        What it writes into one array alone, as `apply_updates` does, is that array.
        """
        ids = [*{x for x in operands if isinstance(x, Ids)}]
        results: list[Value] = []
        for var in eqn.outvars:
            aval: Any = var.aval
            shape = getattr(aval, "shape", ())
            i = self._tables.get(shape[0]) if shape else None
            result: Value = None
            if i is not None:
                rows = {x for x in operands if isinstance(x, AllRows) and x.table == i}
                result = rows.pop() if len(rows) == 1 else AllRows(i, None)
            elif shape and len(ids) == 1 and jnp.issubdtype(aval.dtype, jnp.integer):
                result = ids[0]
            results.append(result)
        return results

    def _of_ids(
        self, name: str, eqn: JaxprEqn, operands: list[Value]
    ) -> list[Value] | None:
        """Ids that are moved, made positive or compared, and `None` for all others."""
        if name == "sort":
            return operands
        used = operands[1:] if name == "select_n" else operands
        if name in ("gather", "dynamic_slice"):  # of ids, or of what is no table's
            used = operands[:1]
        is_own = isinstance(operands[0], _Scratch | None)
        if name.startswith("scatter") and is_own and isinstance(operands[1], Ids):
            return [_Scratch(operands[1].table)]
        if name == "gather" and isinstance(operands[0], _Scratch):
            return [None]
        numbers = [x.value for x in used if isinstance(x, _Number)]
        ids = [x for x in used if isinstance(x, Ids)]
        # Beside each other, for several axes of a lookup; not one after the other.
        aval: Any = eqn.outvars[0].aval
        is_apart = name == "concatenate" and eqn.params["dimension"] == aval.ndim - 1
        are_all = is_apart or len(ids) + len(numbers) == len(used)
        if len({*ids}) != 1 or not are_all:
            return None
        size = self.sizes[ids[0].table]
        if name in _COMPARED:
            turned = name.translate(_TURNED) if operands[0] not in ids else name
            allowed = {(turned, x) in _bounds(size) for x in numbers}
            return [None] if allowed <= {True} else None
        if name == "add":
            return [ids[0]] if numbers == [size] else None
        is_moved = name in _MOVES and {*numbers} <= {0, size - 1, size}
        return [ids[0]] if is_moved else None


def _bounds(size: int) -> set[tuple[str, complex]]:
    """Comparisons that say whether a row is there, and not which one it is."""
    return {
        *(("lt", 0), ("ge", 0), ("le", size - 1), ("gt", size - 1)),
        *(("lt", size), ("ge", size), ("eq", size), ("ne", size)),
    }


def _merged(values: Sequence[Value]) -> Value:
    """What one of these is, whichever, if it is known."""
    leaves = {x for x in values if isinstance(x, AllRows) and x.leaf is not None}
    kinds = {*values} - {x._replace(leaf=None) for x in leaves}
    return kinds.pop() if len(kinds) == 1 else None
