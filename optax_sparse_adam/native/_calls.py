"""Calls of the kernel (`rows.cc`) on JAX arrays, and which arrays it supports.

The memory of what is updated is that of the result. The C++ checks all types and sizes
when it runs (`buffers.h`), and the order of entries (`rows.cc`): no call reads or
writes outside of its buffers, whatever its caller has checked.
"""

import math
import sys
from collections.abc import Sequence
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

_FLOATS = ("float32", "bfloat16")  # of tables and moments that the kernel updates
_FLAGS = {"read": ("uses_roots", "decays"), "update": ("uses_roots", "decays", "adds")}


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


class RowwiseAdagradScalars(NamedTuple):
    """The scalars of `rowwise_adagrad`, in float32; as in `update.h`."""

    scale: jax.Array  # of the update: minus the learning rate
    eps: jax.Array
    decay: jax.Array


class RowwiseAdamScalars(NamedTuple):
    """The scalars of `rowwise_adam`, in float32; as in `update.h`.

    A weight is that of the new value in a moving average, or where that is smaller,
    which `is_old` says by a 1, that of the old one.
    """

    scale: jax.Array
    eps: jax.Array
    decay: jax.Array
    weight1: jax.Array
    weight2: jax.Array
    is_old1: jax.Array
    is_old2: jax.Array
    correction1: jax.Array
    correction2: jax.Array


class Stale(NamedTuple):
    """Stale rows of a table: their state, and what brings them up to date.

    Attributes:
      tables: `mu`, `nu` and `last`; if rows decay, both of `log_decay`.
      uses_roots: Whether the polynomials are of `sqrt(s)`; see `remaining_update.py`.
      scalars: `StaleScalars` of each parameter of the state, `[parameters, 6]`.
      polynomials: Of each, `[parameters, 2, coefficients]`; with that after a step, 3.
      steps: Of each, the step that rows are brought to, and the last of those after
        which they hold values, `[parameters, 2]`.
      place: Which of them the table is, an `int32` scalar.
    """

    tables: tuple[jax.Array, ...]
    uses_roots: bool
    scalars: jax.Array
    polynomials: jax.Array
    steps: jax.Array
    place: jax.Array


def supports(floats: Any, ids: jax.Array, *arrays_of_any_type: Any) -> bool:
    """Whether the kernel is there, and takes these types, on one device.

    While tracing. What else each of the calls below needs says `_rows.kernel_ops`.
    """
    arrays = jax.tree.leaves((floats, ids, arrays_of_any_type))
    # A program of `jax.export` with symbolic sizes is for other processes, which may
    # not have the kernel.
    return all(isinstance(x.size, int) for x in arrays) and (
        all(x.dtype in _FLOATS for x in jax.tree.leaves(floats))
        and ids.dtype == jnp.int32
        and all(x.size > 0 for x in arrays)
        and mesh_of(*arrays).empty
        and available()
    )


def _call(
    call: str,
    table_shape: tuple[int, ...],
    operands: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any] | int],
    **attributes: Any,
) -> Sequence[jax.Array]:
    """Calls the kernel.

    Args:
      call: The handler and the formula.
      table_shape: The shape of the table.
      operands: Arrays; `None` for one that is left out.
      results: The shape and the type of each, or the place of the operand whose memory
        it takes.
      attributes: What the handler has beside these.
    """
    if math.prod(table_shape) == 0:
        raise ValueError(
            f"The kernel takes no empty table, got the shape {table_shape}. Read it in "
            "plain JAX."
        )
    handler, formula = call.split()
    arrays = [jnp.zeros([0], jnp.float32) if x is None else x for x in operands]
    types = [
        jax.typeof(arrays[x]) if isinstance(x, int) else jax.ShapeDtypeStruct(*x)
        for x in results
    ]
    function = jax.ffi.ffi_call(
        f"optax_sparse_adam.{handler}",
        types,
        input_output_aliases={
            x: i for i, x in enumerate(results) if isinstance(x, int)
        },
    )
    made: Sequence[jax.Array] = function(
        *arrays,
        formula=formula,
        num_rows=np.int64(table_shape[0]),
        width=np.int64(math.prod(table_shape[1:])),
        **dict.fromkeys(_FLAGS[handler], np.bool_(False)) | attributes,
    )
    return made


def _filled(fill: float | None, dtype: Any) -> dict[str, Any]:
    """What an id out of bounds reads: `fill`, or `None` for the row next to it."""
    value = np.asarray(0 if fill is None else fill, dtype)
    bits = int.from_bytes(value.tobytes(), sys.byteorder)
    return {"clamps": np.bool_(fill is None), "fill": np.int64(bits)}


def look_up_rows(table: jax.Array, ids: jax.Array, fill: float | None) -> jax.Array:
    """`table[ids]`, `[*ids.shape, *table.shape[1:]]`.

    An id out of bounds reads `fill`, or if that is `None` the row that is next to it.
    """
    like = (*ids.shape, *table.shape[1:]), table.dtype
    filled = _filled(fill, table.dtype)
    (rows,) = _call("read rows", table.shape, [table, ids], [like], **filled)
    # A custom call has no weak types, and the rows of `jnp.full((n, d), 0.1)` have one.
    weak: bool = jax.typeof(table).weak_type
    return _cast_p.bind(rows, new_dtype=rows.dtype, weak_type=weak, sharding=None)


def look_up_stale_rows(
    table: jax.Array, stale: Stale, ids: jax.Array, fill: float | None
) -> jax.Array:
    """`look_up_rows`, brought up to date: `rows.values_of_rows` of them."""
    (rows,) = _call(
        "read exact_adam",
        table.shape,
        [table, *stale.tables, *stale[2:], ids],
        [((*ids.shape, *table.shape[1:]), jnp.float32)],
        **_stale_attributes(stale),
        **_filled(fill, "float32"),
    )
    return rows


def read_bags(
    table: jax.Array,
    ids: jax.Array,
    segments: jax.Array | None,
    weights: jax.Array | None,
    num_bags: int,
) -> jax.Array:
    """`RowOps.look_up_bags`, `[num_bags, *row_shape]` in float32."""
    weights = None if weights is None else weights.ravel()
    (sums,) = _call(
        "read bags",
        table.shape,
        [table, ids.ravel(), _ids_or_none(segments), weights],
        [((num_bags, *table.shape[1:]), jnp.float32)],
        **_filled(None, "float32"),
    )
    return sums


def _ids_or_none(ids: jax.Array | None) -> jax.Array:
    return jnp.zeros([0], jnp.int32) if ids is None else ids


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jnp.zeros` in huge pages, where the system has them."""
    result = jax.ShapeDtypeStruct(shape, dtype)
    cleared: jax.Array = jax.ffi.ffi_call("optax_sparse_adam.zeros", result)()
    return cleared


def indices_of(grad: Any) -> jax.Array:
    """Those of a gradient that `canary` has seen."""
    name = "stored_indices" if hasattr(grad, "stored_indices") else "indices"
    indices: jax.Array = getattr(grad, name)
    return indices


def _update(
    formula: str,
    grad: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    **flags: Any,
) -> Sequence[jax.Array]:
    """A formula's results of a gradient, or of one of bags; see `bag_gradient`.

    `operands` and `results` are those behind the gradient's, which are four.
    """
    segments = getattr(grad, "segments", None)
    if segments is None:
        values, weights = grad.data, None
    else:
        values, weights = grad.values, grad.weights
    # A call of its own: tables that are looked up by the same ids share it.
    like = (grad.nse, 2), jnp.int32
    (order,) = _call("update order", grad.shape[:1], [indices_of(grad)], [like])
    entries = [order, values, _ids_or_none(segments), weights]
    return _call(
        f"update {formula}", grad.shape, [*entries, *operands], results, **flags
    )


def _update_of(grad: Any) -> list[Any]:
    """The indices and the rows of an update, as results of `_update`.

    That of a gradient is in its memory. A buffer of its own would save the copy of one
    that is not donated, but whole steps, whose gradient is, took longer (262,144 ids:
    116 and 94 ms): fresh memory. The gradient of bags has no room for rows.
    """
    of_bags = getattr(grad, "segments", None) is not None
    rows: Any = ((grad.nse, *grad.shape[1:]), jnp.float32) if of_bags else 1
    return [((grad.nse, 1), jnp.int32), rows]


def sum_rows(grad: Any) -> Sums:
    """Adds up duplicate rows.

    Returns:
      The fields of `coalesce.Rows`: the touched rows `[nse, 1]` in ascending order,
      then `num_rows + slot`; their sums, then zeros; and how many rows they are.
    """
    like = (), jnp.int32
    indices, sums, count = _update("sum", grad, [None], [*_update_of(grad), like])
    return indices, sums, count


def update_by_formula(
    formula: str,
    grad: BCOO,
    state: tuple[jax.Array, ...],
    read: tuple[jax.Array, ...],
    target: tuple[jax.Array, ...],
    scalars: Any,
    constants: Sequence[jax.Array] = (),
    **flags: Any,
) -> tuple[RowUpdate | jax.Array, tuple[jax.Array, ...]]:
    """The update of each touched row by "adam", "rowwise_adagrad" and so on, the state.

    All other slots are padding. The indices are unique; those of a BCOO are where the
    first entry of the row was, and those of bags in ascending order.

    Args:
      formula: Its name in `rows.cc`.
      grad: The gradient.
      state: The arrays of the state, which get the new rows.
      read: With weight decay, the parameter, of float32.
      target: The parameter, of float32, if the update is to be added to it: the first
        result is then the new one.
      scalars: As the formula has them.
      constants: Operands in front of them.
      flags: Attributes of the call.
    """
    owners = [*range(4, 4 + len(state) + len(target))]
    results = [*([] if target else _update_of(grad)), *owners]
    operands = [*state, *(read or target), *constants, jnp.asarray(scalars)]
    marks = {"decays": np.bool_(len(read) > 0), "adds": np.bool_(len(target) > 0)}
    made = _update(formula, grad, operands, results, **marks, **flags)
    if target:
        return made[-1], (*made[:-1],)
    return (made[0], made[1]), (*made[2:],)


def exact_adam_rows(
    grad: BCOO,
    stale: Stale,
    step: Any,
    read: tuple[jax.Array, ...],
    target: tuple[jax.Array, ...],
) -> tuple[RowUpdate | jax.Array, tuple[jax.Array, ...]]:
    """`update_by_formula`, with the step of `exact_adam`, and its new tables."""
    args = stale.tables, read, target, step, stale[2:]
    uses_roots = np.bool_(stale.uses_roots)
    return update_by_formula("exact_adam", grad, *args, uses_roots=uses_roots)


def _stale_attributes(stale: Stale) -> dict[str, Any]:
    decays = len(stale.tables) > 3
    return {"uses_roots": np.bool_(stale.uses_roots), "decays": np.bool_(decays)}


def add_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].add(rows)` for unique indices, rounded once."""
    return _call("update add", table.shape, [table, indices, rows], [0])[0]


def put_rows(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[indices].set(rows)` for unique indices; the rows have its type."""
    return _call("update put", table.shape, [table, indices, rows], [0])[0]
