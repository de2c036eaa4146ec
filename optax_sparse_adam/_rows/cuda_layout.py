"""Rows of arrays as the kernel for GPUs sees them: a matrix, or one number a row."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..native._cuda_printer import ROWS, Program, Unsupported, print_formula
from ..native._cuda_source import Array, Kernel
from .map_rows import Tables
from .padding import in_bounds

MOST = 2**31 - 1024  # keys and places are numbers of 32 bits
_MOST_COLUMNS = 1024


class Layout(NamedTuple):
    """How arrays have rows: `[*sizes]` or `[*sizes, *row_shape]`."""

    sizes: tuple[int, ...]
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], n_sparse: int) -> "Layout":
        layout = cls(tuple(shape[:n_sparse]), tuple(shape[n_sparse:]))
        if not 0 < layout.rows < MOST:
            raise Unsupported(f"{layout.rows} rows")
        if not 0 < layout.columns <= _MOST_COLUMNS:
            raise Unsupported(f"rows of {layout.columns} numbers")
        return layout

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def columns(self) -> int:
        return math.prod(self.row_shape)

    def array(self, x: jax.Array) -> Array:
        shapes = {(*self.sizes, *self.row_shape): True, self.sizes: False}
        for shape, is_wide in shapes.items():
            if x.shape == shape:
                return Array(x.dtype, is_wide or not self.row_shape)
        raise Unsupported(f"an array of shape {x.shape} beside rows {self.row_shape}")

    def flat(self, x: jax.Array) -> jax.Array:
        shape = (self.rows, self.columns) if self.array(x).is_wide else (self.rows,)
        return x if x.shape == shape else x.reshape(shape)

    def keys(self, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The place of each row in the flattened table, and whether it is one."""
        if not 0 < len(indices) < MOST:
            raise Unsupported(f"{len(indices)} entries")
        if indices.dtype.itemsize < 4:  # which may not hold the number of rows
            indices = indices.astype(jnp.int32)
        valid = in_bounds(indices, self.sizes)
        keys = jnp.where(valid, indices[:, 0], 0).astype(jnp.int32)
        for axis, size in enumerate(self.sizes[1:], 1):
            index = jnp.where(valid, indices[:, axis], 0).astype(jnp.int32)
            keys = keys * jnp.int32(size) + index
        return keys, valid

    def indices(self, keys: jax.Array, dtype: Any) -> jax.Array:
        """The reverse of `keys`."""
        columns = []
        for size in self.sizes[:0:-1]:
            columns.append(keys % jnp.int32(size))
            keys = keys // jnp.int32(size)
        return jnp.stack([keys, *columns[::-1]], axis=1).astype(dtype)


class RowProgram(NamedTuple):
    """A formula in C++, and the arrays whose rows it gets.

    Attributes:
      program: The formula.
      layout: Of the arrays.
      tables: Those that get new rows, flat.
      read: Those that are read, flat.
      out: The type of its first result, which is put out for each key, if it has one.
    """

    program: Program
    layout: Layout
    tables: Tables
    read: Tables
    out: Any

    @property
    def kernel(self) -> Kernel:
        tables, read = (tuple(map(_array, x)) for x in (self.tables, self.read))
        return Kernel(self.layout.columns, tables, read, self.out)


def _array(x: jax.Array) -> Array:
    return Array(x.dtype, x.ndim == 2)


def row_program(
    function: Callable[..., Sequence[jax.Array]],
    layout: Layout,
    tables: Tables,
    read: Tables,
    *args: Any,
    grad: Any = None,
    out: Any = None,
    size: int = ROWS,
) -> RowProgram:
    """Prints `function(rows, *args)`; `rows` are the gradient and those of the arrays.

    Args:
      function: Returns what is put out, if anything is, and the new rows of `tables`.
      layout: Of the arrays.
      tables: Arrays that get new rows.
      read: Arrays that are read.
      *args: What the function takes besides, the same for all rows.
      grad: The type of the gradient, if there is one.
      out: The type of what is put out, if anything is.
      size: How many rows there are, where the function may depend on it.
    """
    rows = [("g", Array(grad, True))] if grad is not None else []
    rows += [(f"t{i}", layout.array(x)) for i, x in enumerate(tables)]
    rows += [(f"r{i}", layout.array(x)) for i, x in enumerate(read)]
    shapes = [
        (name, layout.row_shape if x.is_wide else (), x.dtype, x.is_wide)
        for name, x in rows
    ]
    program = print_formula(function, shapes, layout.columns, args, size)
    flat_tables, flat_read = (tuple(map(layout.flat, x)) for x in (tables, read))
    return RowProgram(program, layout, flat_tables, flat_read, out)
