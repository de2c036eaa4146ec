"""Calls of the kernel (`rows.cc`) on JAX arrays, and which arrays it supports.

`buffers.h` lists the operands and results of each call, by which `_call` checks arrays
and makes results: the memory of what is updated is that of the result. The C++ compares
types and sizes with the same list once more when it runs: no call reads or writes
outside of its buffers, whatever a caller has checked.
"""

import functools
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from jax.extend.core import primitives

from .._jax_extras.sharding import mesh_of
from ._library import available as available

_cast_p = primitives.convert_element_type_p

Sums = tuple[jax.Array, jax.Array, jax.Array]
RowUpdate = tuple[jax.Array, jax.Array]  # their indices, and values

# The kernel reads rows of these widths faster than XLA, three to four times at 64: XLA
# unrolls its loop over a row, and vectorizes it only if it is longer.
_READ_WIDTHS = range(17, 80)
_FLOATS = ("float32", "bfloat16")  # of tables and moments that the kernel updates
_CLEARED = ("float32", "bfloat16", "float16", "float64", "int32")
_HUGE_PAGES = 4 << 20  # bytes that have a page of 2 MB inside, wherever they begin


class StaleScalars(NamedTuple):
    """What brings stale rows up to date, in float32; as in `exact_adam.h`."""

    log_b1: jax.Array
    log_q: jax.Array  # of the root of b2
    centre_behind: jax.Array  # of the polynomials since `values_until`, and ahead
    centre_ahead: jax.Array
    decay_high: jax.Array  # logarithm of all decays up to now, in two parts
    decay_low: jax.Array


class StepScalars(NamedTuple):
    """What a step of exact Adam needs beside, in float32; as in `exact_adam.h`."""

    one_minus_b1: jax.Array
    one_minus_b2: jax.Array
    size: jax.Array  # of the update, by the first moment and by the gradient
    grad_size: jax.Array
    eps: jax.Array
    log_decay: jax.Array  # of this step
    centre: jax.Array  # of the polynomial after this step
    decay_high: jax.Array  # of all steps up to this one
    decay_low: jax.Array


class Stale(NamedTuple):
    """Stale rows of a table: their state, and what brings them up to date.

    Attributes:
      tables: `mu`, `nu` and `last`; if rows decay, both of `log_decay`.
      scalars: Scalars.
      polynomials: `[2, coefficients]`, or `[3, coefficients]` with that after a step.
      uses_roots: Whether these are polynomials of `sqrt(s)`; see `remaining_update.py`.
      steps: The step that rows are brought to, and the last of those after which they
        hold values.
    """

    tables: tuple[jax.Array, ...]
    scalars: StaleScalars
    polynomials: jax.Array
    uses_roots: bool
    steps: jax.Array


def _supports(floats: Any, ids: jax.Array, *others: Any) -> bool:
    """Whether the kernel is there, and takes these types, on one device."""
    arrays = jax.tree.leaves((floats, ids, others))
    return (
        all(x.dtype in _FLOATS for x in jax.tree.leaves(floats))
        and ids.dtype == jnp.int32
        and all(x.size > 0 for x in arrays)
        and mesh_of(*arrays).empty
        and available()
    )


def supports_update(grad: BCOO, *tables: jax.Array) -> bool:
    """Whether the kernel updates these tables; while tracing, as all below."""
    return (
        grad.dtype == jnp.float32
        and grad.n_sparse == 1
        and grad.nse > 0
        and math.prod(grad.shape) > 0
        and _supports(tables, grad.indices)
        and mesh_of(*jax.tree.leaves(grad)).empty
    )


def supports_lookup(table: jax.Array, ids: jax.Array) -> bool:
    """Whether the kernel reads these rows, and faster than XLA."""
    # XLA may widen a bfloat16 table, out of the loop that looks its rows up.
    is_slow = math.prod(table.shape[1:]) in _READ_WIDTHS or table.dtype == jnp.bfloat16
    return is_slow and _supports(table, ids)


def supports_bags(table: jax.Array, ids: jax.Array) -> bool:
    """Whether the kernel reads bags of this table."""
    return _supports(table, ids)


def supports_write(table: jax.Array, indices: jax.Array, rows: jax.Array) -> bool:
    """Whether the kernel writes these rows."""
    return indices.shape[1] == 1 and _supports((table, rows), indices)


def supports_stale_lookup(
    table: jax.Array, tables: tuple[jax.Array, ...], ids: jax.Array
) -> bool:
    """Whether the kernel takes these for `look_up_stale_rows`.

    At any width: in plain JAX, rows are gathered from three tables or more.
    """
    mu, nu, last, *decays = tables
    floats = (table, mu, nu, *decays)
    return (
        all(x.dtype == jnp.float32 for x in floats)
        and last.dtype == jnp.int32
        and last.ndim == 1
        and _supports(floats, ids, last)
    )


def supports_zeros(param: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether the kernel is there and makes these zeros, on the device of `param`.

    A step goes to some rows of a state, and to others in the next one. The processor
    remembers the places of more memory by pages of 2 MB than by those of 4 kB, which
    XLA's own arrays have: a step of 8,192 ids of 1M x 64 takes an eighth less, one of
    65,536 a twentieth.

    Not inside of a program, which XLA would keep from merging equal arrays, and from
    dropping those that are not used.
    """
    if not isinstance(param, jax.Array) or isinstance(param, jax.core.Tracer):
        return False
    devices: Any = param.sharding.device_set
    device, *others = devices
    return (
        str(dtype) in _CLEARED
        and math.prod(shape) * dtype.itemsize >= _HUGE_PAGES
        and device.platform == "cpu"
        and not others
        and param.sharding.memory_kind in (None, device.default_memory().kind)
        and mesh_of(param).empty
        and available()
    )


class _Buffer(NamedTuple):
    """A buffer of a call, as `buffers.h` describes it."""

    name: str
    type: str  # empty for a result in the memory of the operand of this name
    sizes: str
    is_optional: bool


@functools.cache
def _specifications() -> dict[str, tuple[list[_Buffer], list[_Buffer]]]:
    """The operands and the results of each call."""
    text = Path(__file__).with_name("buffers.h").read_text(encoding="utf-8")

    def buffers(words: str) -> list[_Buffer]:
        found = re.findall(r"(\w+)(?:=|:(\w)\[(\w*)\](\??))", words)
        return [_Buffer(name, of, size, mark == "?") for name, of, size, mark in found]

    text = re.sub(r"\n +", " ", text)  # a line goes on where the next is indented
    lines = re.findall(r"^((?:read|update) \w+): (.*) -> (.*)$", text, re.MULTILINE)
    return {call: (buffers(args), buffers(rets)) for call, args, rets in lines}


def _call(
    call: str,
    operands: Mapping[str, Any],
    row_shape: tuple[int, ...],
    num_rows: int,
    **others: Any,
) -> dict[str, jax.Array]:
    """The results of a call by name.

    Args:
      call: The handler and the formula, as in `buffers.h`.
      operands: Arrays by name; `None` for one that is left out.
      row_shape: The shape of a row of the table.
      num_rows: The number of rows of the table.
      others: The shapes that the letters of `buffers.h` stand for; attributes; and
        `in_place`, other results that take the memory of an operand.

    Raises:
      ValueError: If the type or the shape of an array is another.
    """
    handler, formula = call.split()
    in_place = others.pop("in_place", {})
    expected, results = _specifications()[call]
    shapes = {k: others.pop(k) for k in [*others] if len(k) == 1}
    shapes |= {"N": (num_rows,), "W": row_shape}
    shapes |= {digit: (int(digit),) for digit in "1234567890"}
    types = {"f": "float32", "i": "int32"}

    def struct(buffer: _Buffer) -> jax.ShapeDtypeStruct:
        shape = tuple(x for letter in buffer.sizes for x in shapes[letter])
        return jax.ShapeDtypeStruct(shape, types[buffer.type])

    arrays = {}
    for buffer in expected:
        x = operands[buffer.name]
        if x is None and buffer.is_optional:
            arrays[buffer.name] = jnp.zeros([0], types[buffer.type])
            continue
        if buffer.type in "tu" and x.dtype in _FLOATS:
            types.setdefault(buffer.type, str(x.dtype))
        types.setdefault(buffer.type, "float32")
        like = struct(buffer)
        if x.dtype != like.dtype or x.shape != like.shape:
            raise ValueError(
                f"The kernel takes {buffer.name} of type {like.dtype} and shape "
                f"{like.shape}, got {x.dtype} and {x.shape}. Make the state by `init` "
                "of the same parameters as the gradient."
            )
        arrays[buffer.name] = x
    if math.prod((num_rows, *row_shape)) == 0:
        raise ValueError(
            f"The kernel takes no empty table, got the shape {(num_rows, *row_shape)}. "
            "Read it in plain JAX."
        )
    places = [*arrays]
    owners = {x.name: x.name for x in results if not x.type} | in_place
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{handler}",
        [struct(x) if x.type else jax.typeof(arrays[x.name]) for x in results],
        input_output_aliases={
            places.index(owners[x.name]): i
            for i, x in enumerate(results)
            if x.name in owners
        },
    )
    attributes = {
        "formula": formula,
        "num_rows": np.int64(num_rows),
        "width": np.int64(math.prod(row_shape)),
        "degree": np.int64(math.prod(shapes.get("C", (0,)))),
        "uses_roots": np.bool_(False),
        **others,
    }
    news = function(*arrays.values(), **attributes)
    return {x.name: new for x, new in zip(results, news, strict=True)}


def _filled(fill: float | None, dtype: Any) -> dict[str, Any]:
    """What an id out of bounds reads: `fill`, or `None` for the row next to it."""
    value = np.asarray(0 if fill is None else fill, dtype)
    bits = int.from_bytes(value.tobytes(), sys.byteorder)
    return {"clamps": np.bool_(fill is None), "fill": np.int64(bits)}


def look_up_rows(table: jax.Array, ids: jax.Array, fill: float | None) -> jax.Array:
    """`table[ids]`, `[*ids.shape, *table.shape[1:]]`.

    An id out of bounds reads `fill`, or if that is `None` the row that is next to it.
    """
    operands = {"table": table, "ids": ids}
    attributes = _filled(fill, table.dtype)
    sizes = table.shape[1:], len(table)
    rows = _call("read rows", operands, *sizes, K=ids.shape, **attributes)["rows"]
    # A custom call has no weak types, and the rows of `jnp.full((n, d), 0.1)` have one.
    weak: bool = jax.typeof(table).weak_type
    return _cast_p.bind(rows, new_dtype=rows.dtype, weak_type=weak, sharding=None)


def look_up_stale_rows(
    table: jax.Array, stale: Stale, ids: jax.Array, fill: float | None
) -> jax.Array:
    """`look_up_rows`, brought up to date: `rows.values_of_rows` of them."""
    operands = {"table": table, "ids": ids, **_stale_operands(stale)}
    return _call(
        "read exact_adam",
        operands,
        table.shape[1:],
        len(table),
        K=ids.shape,
        **_stale_attributes(stale),
        **_filled(fill, "float32"),
    )["rows"]


def read_bags(
    num_bags: int,
    table: jax.Array,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`bags.sum_bags`, `[num_bags, *row_shape]` in float32."""
    operands = {
        "table": table,
        "ids": ids.ravel(),
        "segments": segments,
        "weights": None if weights is None else weights.ravel(),
    }
    sizes = {"E": (ids.size,), "B": (num_bags,)}
    fill = _filled(None, "float32")
    return _call("read bags", operands, table.shape[1:], len(table), **sizes, **fill)[
        "sums"
    ]


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jnp.zeros` in huge pages, where the system has them."""
    result = jax.ShapeDtypeStruct(shape, dtype)
    cleared: jax.Array = jax.ffi.ffi_call("optax_sparse_adam.zeros", result)()
    return cleared


def _update(
    formula: str, grad: Any, operands: dict[str, Any], **others: Any
) -> tuple[RowUpdate, dict[str, jax.Array]]:
    """Calls the kernel with a gradient, or one of bags; see `bag_gradient`.

    Sums elsewhere would save the copy of a gradient that is not donated, but whole
    steps, whose gradient is, took longer (262,144 ids: 116 and 94 ms): fresh memory.
    The gradient of bags has no room for rows.
    """
    segments = getattr(grad, "segments", None)
    if segments is None:
        factors = {"data": grad.data, "weights": None}
    else:
        factors = {"data": grad.values, "weights": grad.weights}
    results = _call(
        f"update {formula}",
        {"indices": grad.indices, "segments": segments, **factors, **operands},
        grad.shape[1:],
        grad.shape[0],
        E=(grad.nse,),
        V=(grad.nse if segments is None else len(grad.values),),
        in_place={"sums": "data"} if segments is None else {},
        **others,
    )
    return (results.pop("indices"), results.pop("sums")), results


def sum_rows(grad: BCOO) -> Sums:
    """Adds up duplicate rows.

    Returns:
      The fields of `coalesce.Rows`: the touched rows `[nse, 1]` in ascending order,
      then `num_rows + slot`; their sums, then zeros; and how many rows they are.
    """
    rows, others = _update("sum", grad, {})
    return (*rows, others["count"])


def adam_rows(
    grad: BCOO, moments: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...]
) -> tuple[RowUpdate, tuple[jax.Array, ...]]:
    """The update of each touched row in the slot of its first entry; the new moments.

    All other slots are padding. The indices are unique, and not in order.
    """
    mu, nu = moments
    operands = {"mu": mu, "nu": nu, "scalars": jnp.stack(scalars)}
    rows, news = _update("adam", grad, operands)
    return rows, (news["mu"], news["nu"])


def exact_adam_rows(
    grad: BCOO, stale: Stale, step: StepScalars, read: tuple[jax.Array, ...]
) -> tuple[RowUpdate, tuple[jax.Array, ...]]:
    """Like `adam_rows`, with the step of `exact_adam`, and its new tables.

    If rows decay, it reads the parameter.
    """
    operands = _stale_operands(stale) | {"step": jnp.stack(step)}
    operands["table"] = read[0] if read else None
    rows, news = _update("exact_adam", grad, operands, **_stale_attributes(stale))
    names = ("mu", "nu", "last", "high", "low")[: len(stale.tables)]
    return rows, tuple(news[name] for name in names)


def _stale_operands(stale: Stale) -> dict[str, jax.Array | None]:
    mu, nu, last, *decays = stale.tables
    high, low = decays or (None, None)
    tables = {"mu": mu, "nu": nu, "last": last, "high": high, "low": low}
    scalars = jnp.stack(stale.scalars)
    packed = {"scalars": scalars, "polynomials": stale.polynomials}
    return {**tables, **packed, "steps": stale.steps}


def _stale_attributes(stale: Stale) -> dict[str, Any]:
    return {
        "C": stale.polynomials.shape[1:],
        "uses_roots": np.bool_(stale.uses_roots),
    }


def add_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].add(rows)` for unique indices, rounded once."""
    return _write("add", table, indices, rows)


def put_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].set(rows)` for unique indices; the rows have its type."""
    return _write("put", table, indices, rows)


def _write(
    formula: str, table: jax.Array, indices: jax.Array, rows: jax.Array
) -> jax.Array:
    operands = {"table": table, "indices": indices, "rows": rows}
    sizes = table.shape[1:], len(table)
    return _call(f"update {formula}", operands, *sizes, E=(len(indices),))["table"]
