"""Calls of the kernel (`rows.cc`) on JAX arrays, and which arrays it takes.

Rows and their values go in and come out as `(indices, data, ...)`, in the place of the
arrays that are updated; `count` comes last.
"""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from jax.extend.core import primitives

from .._jax_extras.sharding import mesh_of
from ._library import available

_cast_p = primitives.convert_element_type_p

Sums = tuple[jax.Array, jax.Array, jax.Array]

# The kernel reads rows of these widths faster than XLA, three to four times at 64: XLA
# unrolls its loop over a row, and vectorizes it only if it is longer.
_READ_WIDTHS = range(17, 80)
_FLOATS = ("float32", "bfloat16")  # of tables and moments that the kernel updates
# How many numbers come before the nodes of the ways: of `resting_rows.numbers_of_rows`
# and of `exact_formula._numbers`. As `kNumbers` in `exact_adam.h`.
_RESTING_NUMBERS, _STEP_NUMBERS = 6, 9
_CLEARED = ("float32", "bfloat16", "float16", "float64", "int32")
_HUGE_PAGES = 4 << 20  # bytes that have a page of 2 MB inside, wherever they begin


def fits(grad: BCOO, *tables: jax.Array) -> bool:
    """Whether the kernel is there and takes these arrays; known while tracing."""
    return (
        grad.dtype == jnp.float32
        and all(table.dtype in _FLOATS for table in tables)
        and grad.indices.dtype == jnp.int32
        and grad.n_sparse == 1
        and grad.nse > 0
        and math.prod(grad.shape) > 0
        and mesh_of(*jax.tree.leaves((grad, tables))).empty
        and available()
    )


def reads(table: jax.Array, ids: jax.Array) -> bool:
    """Whether the kernel is there and reads these rows faster; known while tracing."""
    is_slow = math.prod(table.shape[1:]) in _READ_WIDTHS
    return (
        # XLA may widen a bfloat16 table, out of the loop that looks its rows up.
        (table.dtype == jnp.bfloat16 or (table.dtype == jnp.float32 and is_slow))
        and ids.dtype == jnp.int32
        and ids.size > 0
        and table.size > 0
        and mesh_of(table, ids).empty
        and available()
    )


def reads_bags(table: jax.Array, ids: jax.Array) -> bool:
    """Whether the kernel is there and reads bags of this table."""
    return (
        table.dtype in _FLOATS
        and ids.dtype == jnp.int32
        and ids.size > 0
        and table.size > 0
        and mesh_of(table, ids).empty
        and available()
    )


def writes(table: jax.Array, indices: jax.Array, rows: jax.Array) -> bool:
    """Whether the kernel is there and writes these rows; known while tracing."""
    return (
        table.dtype in _FLOATS
        and rows.dtype in _FLOATS
        and indices.dtype == jnp.int32
        and indices.shape[1] == 1
        and rows.size > 0
        and table.size > 0
        and mesh_of(table, indices, rows).empty
        and available()
    )


def reads_now(table: jax.Array, tables: tuple[jax.Array, ...], ids: jax.Array) -> bool:
    """Whether the kernel is there and takes these for `look_up_rows_now`.

    At any width: in plain JAX, rows are gathered from three tables or more.
    """
    mu, nu, last, *decays = tables
    floats = {x.dtype for x in (table, mu, nu, *decays)}
    return (
        floats == {jnp.dtype("float32")}
        and last.dtype == ids.dtype == jnp.int32
        and last.ndim == 1
        and ids.size > 0
        and table.size > 0
        and mesh_of(table, *tables, ids).empty
        and available()
    )


def clears(param: Any, shape: tuple[int, ...], dtype: Any) -> bool:
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


def _check(name: str, x: jax.Array, dtype: Any, shape: tuple[int, ...]) -> None:
    """Raises unless an array has the type and shape that the kernel takes.

    The kernel compares sizes once more when it runs, and XLA types: no call reads or
    writes outside of its buffers, whatever a caller has checked.

    Raises:
      ValueError: If the type or the shape is another.
    """
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(
            f"The kernel takes {name} of type {dtype} and shape {shape}, got "
            f"{x.dtype} and {x.shape}. Make the state by `init` of the same parameters "
            "as the gradient."
        )


def look_up_rows(table: jax.Array, ids: jax.Array, fill: float | None) -> jax.Array:
    """`table[ids]`, `[*ids.shape, *table.shape[1:]]`.

    An id out of bounds reads `fill`, or if that is `None` the row that is next to it.
    """
    _check("ids", ids, "int32", ids.shape)
    if table.size == 0:
        raise ValueError(
            f"The kernel takes no empty table, got the shape {table.shape}. Read it in "
            "plain JAX."
        )
    call = jax.ffi.ffi_call(
        "optax_sparse_adam.take_rows",
        jax.ShapeDtypeStruct((*ids.shape, *table.shape[1:]), table.dtype),
    )
    rows = call(
        table,
        ids,
        **_sizes(table.shape),
        clamps=np.bool_(fill is None),
        fill=np.int64(_bits(0 if fill is None else fill, table.dtype)),
    )
    # A custom call has no weak types, and the rows of `jnp.full((n, d), 0.1)` have one.
    weak: bool = jax.typeof(table).weak_type
    return _cast_p.bind(rows, new_dtype=rows.dtype, weak_type=weak, sharding=None)


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jnp.zeros` in huge pages, where the system has them."""
    result = jax.ShapeDtypeStruct(shape, dtype)
    cleared: jax.Array = jax.ffi.ffi_call("optax_sparse_adam.zeros", result)()
    return cleared


def read_bags(
    num_bags: int,
    table: jax.Array,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    """`bags.sum_bags`, `[num_bags, *row_shape]` in float32."""
    _check("a table", table, _float_of(table), table.shape)
    _check("ids", ids, "int32", ids.shape)
    call = jax.ffi.ffi_call(
        "optax_sparse_adam.read_bags",
        jax.ShapeDtypeStruct((num_bags, *table.shape[1:]), jnp.float32),
    )
    factors = _factors(ids.size, segments, weights)
    sums: jax.Array = call(table, ids.ravel(), *factors, **_sizes(table.shape))
    return sums


def _factors(
    nse: int, segments: jax.Array | None, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Segments and weights of all entries, or none."""
    segments = jnp.zeros([0], jnp.int32) if segments is None else segments
    weights = jnp.zeros([0], jnp.float32) if weights is None else weights.ravel()
    _check("segments", segments, "int32", (nse,) if segments.size else (0,))
    _check("weights", weights, "float32", (nse,) if weights.size else (0,))
    return segments, weights


def _operands(grad: Any) -> tuple[jax.Array, ...]:
    """Indices, values, segments and weights of a gradient; see `bag_gradient`."""
    segments = getattr(grad, "segments", None)
    if segments is None:
        values, weights, size = grad.data, None, grad.nse
    else:
        values, weights, size = grad.values, grad.weights, len(grad.values)
    _check("indices", grad.indices, "int32", (grad.nse, 1))
    _check("data", values, "float32", (size, *grad.shape[1:]))
    return grad.indices, values, *_factors(grad.nse, segments, weights)


def _results(
    grad: BCOO, tables: tuple[jax.Array, ...]
) -> tuple[list[Any], dict[int, int]]:
    """The results of a call, and which operand each takes the place of.

    Sums elsewhere would save the copy of a gradient that is not donated, but whole
    steps, whose gradient is, took longer (262,144 ids: 116 and 94 ms): fresh memory.
    The gradient of bags has no room for rows.
    """
    rows = jax.ShapeDtypeStruct((grad.nse, *grad.shape[1:]), jnp.float32)
    results = [jax.ShapeDtypeStruct(grad.indices.shape, jnp.int32), rows]
    results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tables]
    aliases = {0: 0} | {4 + i: 2 + i for i in range(len(tables))}
    if not hasattr(grad, "segments"):
        aliases[1] = 1
    return [*results, jax.ShapeDtypeStruct((), jnp.int32)], aliases


def _bits(x: float, dtype: Any) -> int:
    """The bits of a number as an integer, at least 0."""
    return int.from_bytes(np.asarray(x, dtype).tobytes(), sys.byteorder)


def sum_rows(grad: BCOO) -> Sums:
    """Adds up duplicate rows.

    Returns:
      The fields of `coalesce.Rows`: the touched rows `[nse, 1]` in ascending order,
      then `num_rows + slot`; their sums, then zeros; and how many rows they are.
    """
    sums: Sums = _call("sum_rows", grad, (), ())
    return sums


def adam_rows(
    grad: BCOO, moments: tuple[jax.Array, ...], factors: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """The update of each touched row in the slot of its first entry; the new moments.

    All other slots are padding. The indices are unique, and not in order.
    """
    scalars = (jnp.stack(factors),)
    for name, moment in zip(("mu", "nu"), moments, strict=True):
        _check(name, moment, _float_of(moment), grad.shape)
    _check("factors", *scalars, "float32", (5,))
    indices, data, mu, nu, _ = _call("adam_rows", grad, moments, scalars)
    return (indices, data), (mu, nu)


def add_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].add(rows)` for unique indices, rounded once."""
    return _write("add_rows", table, indices, rows)


def put_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].set(rows)` for unique indices; the rows have its type."""
    _check("rows", rows, table.dtype, rows.shape)
    return _write("put_rows", table, indices, rows)


def _write(
    name: str, table: jax.Array, indices: jax.Array, rows: jax.Array
) -> jax.Array:
    nse = len(indices)
    _check("a table", table, _float_of(table), table.shape)
    _check("indices", indices, "int32", (nse, 1))
    _check("rows", rows, _float_of(rows), (nse, *table.shape[1:]))
    call = jax.ffi.ffi_call(
        f"optax_sparse_adam.{name}",
        jax.ShapeDtypeStruct(table.shape, table.dtype),
        input_output_aliases={0: 0},
    )
    updated: jax.Array = call(table, indices, rows, **_sizes(table.shape))
    return updated


def _float_of(x: jax.Array) -> Any:
    """The type that the kernel takes in the place of `x`."""
    return x.dtype if x.dtype in _FLOATS else "float32"


def exact_adam_rows(
    grad: BCOO,
    tables: tuple[jax.Array, ...],
    read: tuple[jax.Array, ...],
    numbers: jax.Array,
    steps: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Like `adam_rows`, with the step of `exact_adam`, and its new tables.

    Args:
      grad: The gradient.
      tables: `mu`, `nu` and `last`; if rows decay, both of `log_decay`.
      read: If rows decay, the parameter.
      numbers: Those of `resting_rows.numbers_of_rows`, then those of
        `exact_formula._numbers`.
      steps: As in `look_up_rows_now`.
    """
    _check_resting(grad.shape, tables, numbers, steps)
    for param in read:
        _check("a table", param, "float32", grad.shape)
    decays = tables[3:]
    results, aliases = _results(grad, tables[:3])
    results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in decays]
    call = jax.ffi.ffi_call(
        "optax_sparse_adam.exact_adam_rows",
        results,
        input_output_aliases=aliases | {9 + i: 6 + i for i in range(len(decays))},
    )
    indices, data, *news = call(
        *_operands(grad),
        *tables[:3],
        numbers,
        steps,
        *decays,
        *read,
        **_sizes(grad.shape),
        nodes=np.int64((numbers.size - _RESTING_NUMBERS - _STEP_NUMBERS) // 3),
    )
    del news[3]  # the count
    return (indices, data), tuple(news)


def look_up_rows_now(
    table: jax.Array,
    tables: tuple[jax.Array, ...],
    numbers: jax.Array,
    steps: jax.Array,
    ids: jax.Array,
    fill: float | None,
) -> jax.Array:
    """`look_up_rows`, brought up to date: `resting_rows.values_of_rows` of them.

    Args:
      table: The parameter of `exact_adam`.
      tables: `mu`, `nu` and `last`; if rows decay, both of `log_decay`.
      numbers: Those of `resting_rows.numbers_of_rows`.
      steps: The step that rows are brought to, and the last of those after which they
        hold values.
      ids: Which rows.
      fill: What an id out of bounds reads; if `None`, the row that is next to it.
    """
    _check("a table", table, "float32", table.shape)
    _check("ids", ids, "int32", ids.shape)
    _check_resting(table.shape, tables, numbers, steps)
    call = jax.ffi.ffi_call(
        "optax_sparse_adam.take_rows_now",
        jax.ShapeDtypeStruct((*ids.shape, *table.shape[1:]), table.dtype),
    )
    rows: jax.Array = call(
        *(table, *tables[:3], numbers, steps, ids, *tables[3:]),
        **_sizes(table.shape),
        nodes=np.int64((numbers.size - _RESTING_NUMBERS) // 2),
        clamps=np.bool_(fill is None),
        fill=np.float32(0 if fill is None else fill),
    )
    return rows


def _check_resting(
    shape: tuple[int, ...],
    tables: tuple[jax.Array, ...],
    numbers: jax.Array,
    steps: jax.Array,
) -> None:
    mu, nu, last, *decays = tables
    for name, moment in (("mu", mu), ("nu", nu)):
        _check(name, moment, "float32", shape)
    _check("last", last, "int32", shape[:1])
    for decay in decays:
        _check("a decay", decay, "float32", shape[:1])
    _check("numbers", numbers, "float32", (numbers.size,))
    _check("steps", steps, "int32", (2,))


def _sizes(shape: tuple[int, ...]) -> dict[str, Any]:
    num_rows, *row_shape = shape
    return {"num_rows": np.int64(num_rows), "width": np.int64(math.prod(row_shape))}


def _call(
    name: str, grad: BCOO, tables: tuple[jax.Array, ...], others: tuple[jax.Array, ...]
) -> Any:
    """Calls the kernel, with the gradient and the tables updated in place."""
    results, aliases = _results(grad, tables)
    call = jax.ffi.ffi_call(
        f"optax_sparse_adam.{name}", results, input_output_aliases=aliases
    )
    return call(*_operands(grad), *tables, *others, **_sizes(grad.shape))
