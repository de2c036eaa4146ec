"""What a lookup reads: which rows of a table, and how they lie in its result.

A table is looked up by `gather`, by `dynamic_slice` and, one row at a constant index,
by `slice`. Here all of them are gathers, which read a window of the table at each
index. For a table `[1000, 8]`:

    program                          indices               window    rows
    t[ids]                           [3, 1], axis 0        [1, 8]    ids
    t[ids, cols]                     [3, 2], axes 0, 1     [1, 1]    ids, cols
    dynamic_slice(t, (i, 0), (2, 8)) [[i, 0], [i + 1, 0]]  [1, 8]    i, i + 1

A `vmap` over the `i` of a slice is a gather of windows [2, 8]: these become rows, too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.compiled import compiled
from .._jax_extras.sharding import partitions_of
from .._rows.bag_sums import take_whole
from .._rows.gather_scatter import gather_windows
from .._rows.padding import narrow_ids, pad_indices, row_bounds
from .._rows.source import ZEROS, Bounds, Mode


class Promises(NamedTuple):
    """What a program says of the ids of a lookup; flags of a BCOO."""

    indices_sorted: bool = False
    unique_indices: bool = False


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A gather of windows of a table.

    Attributes:
      shape: The table's.
      out: The shape of the result.
      params: Those of `lax.gather`.
      indices: `[..., k]`; in a plan only their type and shape.
      constant: The row, for a lookup of one at a constant index.
      sharding: Of the result, where Explicit mesh axes leave it open: of a slice of a
        table that they split, and of the rows of bags.
      is_padded: As in `Bounds`.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]
    params: dict[str, Any]
    indices: Any
    constant: int | None = None
    sharding: NamedSharding | None = None
    is_padded: bool = False

    @property
    def dims(self) -> Any:
        return self.params["dimension_numbers"]

    @property
    def window(self) -> tuple[int, ...]:
        """Size along each axis of the table of what one index reads."""
        return tuple(self.params["slice_sizes"])

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of the table that each column of `_starts` stands for."""
        return (*self.dims.operand_batching_dims, *self.dims.start_index_map)

    @property
    def count(self) -> int:
        return math.prod(self.indices.shape[:-1])

    @property
    def is_filled(self) -> bool:
        """Whether an index out of bounds reads a fill value."""
        return bool(self.params["mode"] == Mode.FILL_OR_DROP)

    @property
    def promises(self) -> Promises:
        """What holds of `rows(1)` by what the program promises of the indices.

        For lookups of whole rows by one id each, if ids are not clamped, by which two
        of them may become one, and have room for distinct padding.
        """
        by_one_id = self.axes == (0,) and self.window == (1, *self.shape[1:])
        if not by_one_id or self.params["mode"] == Mode.CLIP:
            return Promises()
        # A number of ids that is not known, under `jax.export`, may be too large.
        sizes = self.shape[0], self.count
        has_room = all(isinstance(x, int) for x in sizes)
        if not has_room or sum(sizes) >= jnp.iinfo(jnp.int32).max:
            return Promises()
        named = self.params["indices_are_sorted"], self.params["unique_indices"]
        return Promises(*map(bool, named))

    @property
    def depth(self) -> int:
        """How many leading axes are indexed one element at a time.

        An axis of length one that is not the first counts as a part of the row.
        """
        # Of a table [1000, 8], `t[ids]` and `t[ids, 2:4]` have windows [1, 8] and
        # [1, 2] and depth 1, `t[ids, cols]` a window [1, 1] and depth 2. `t[:, cols]`
        # has a window [1000, 1] and depth 0: it reads every row.
        for axis, size in enumerate(self.window):
            is_part = axis and self.shape[axis] == 1
            if size != 1 or axis not in self.axes or is_part:
                return axis
        return len(self.window)

    def read(self, array: jax.Array) -> jax.Array:
        """The gather, of at least two rows: see `_rows.gather_scatter.take_rows`.

        The array has the table's shape, but for axes of length 1 that stand for all
        columns, as those of `exact_adam`'s steps `[rows, 1]`.
        """
        sizes = tuple(map(min, self.window, array.shape))
        params = self.params | {"slice_sizes": sizes}
        lengths = zip(array.shape, self.shape, strict=True)
        one = [axis for axis, (n, m) in enumerate(lengths) if n != m]
        params["dimension_numbers"] = _collapsed(self.dims, one)
        # Along these axes there is index 0 alone, and checkify reports others.
        is_one = [axis in one for axis in self.dims.start_index_map]
        indices = self.indices
        if any(is_one):
            flags = np.expand_dims(is_one, tuple(range(indices.ndim - 1)))
            indices = jnp.where(flags, 0, indices)
        if self.sharding is not None:
            # A gather over split axes needs to be told how its result lies; the type of
            # a slice says it. Axes of length 1 that stand for all columns are whole.
            spec = partitions_of(self.sharding.spec)
            batch = len(self.out) - len(self.dims.offset_dims)
            single = self.dims.collapsed_slice_dims + self.dims.operand_batching_dims
            inner = [size for axis, size in enumerate(sizes) if axis not in single]
            pairs = zip(spec, (*self.out[:batch], *inner), self.out, strict=True)
            whole = PartitionSpec(*(x if n == m else None for x, n, m in pairs))
            gather: Any = jax.sharding.auto_axes(
                functools.partial(lax.gather, **params),
                axes=self.sharding.mesh.explicit_axes,
                out_sharding=NamedSharding(self.sharding.mesh, whole),
            )
            return jnp.asarray(gather(array, indices))
        return gather_windows(array, indices, **params)

    def read_whole(self, delta: jax.Array) -> jax.Array:
        """`read` of the delta of a whole leaf."""
        is_padded = self.is_padded and self.sharding is None
        return take_whole(delta, self.row_ids) if is_padded else self.read(delta)

    @property
    def bounds_of_rows(self) -> Bounds | None:
        """Of a lookup that is `table[row_ids]`, axes in this order; else `None`."""
        axes, batch = self.dims.start_index_map, self.indices.ndim - 1
        # A scalar id under `vmap` indexes all axes; clamped, the others begin at zero.
        is_whole = self.window == (1, *self.shape[1:]) and 0 in axes
        is_whole = is_whole and (len(axes) == 1 or not self.is_filled)
        if not is_whole or self.dims.offset_dims != tuple(range(batch, len(self.out))):
            return None
        names = "mode", "fill_value", "indices_are_sorted", "unique_indices"
        of_gather = Bounds(*(self.params[name] for name in names))
        return of_gather._replace(is_padded=self.is_padded)

    @property
    def row_ids(self) -> jax.Array:
        """The row of each index, as it is given."""
        return self.indices[..., self.dims.start_index_map.index(0)]

    def read_and_fill(self, read: Callable[["Lookup"], jax.Array]) -> jax.Array:
        """`read(clamped lookup)`, with the fill value where an index is out of bounds.

        As `f(fill)` is another value than the fill value of a lookup in `f(table)`.
        """
        if not self.is_filled:
            return read(self)
        params = self.params | {"mode": Mode.CLIP, "fill_value": None}
        indices = self.indices
        if self.is_padded:  # clamped here: checkify asks for no mode
            indices = narrow_ids(indices, self.shape[0])
            indices = jnp.clip(indices, *_as_ids([0, self.shape[0] - 1], indices.dtype))
        rows = read(dataclasses.replace(self, params=params, indices=indices))
        fill = jnp.asarray(self.params["fill_value"], rows.dtype)
        return self.where_inside(rows, fill)

    def where_inside(self, rows: jax.Array, other: jax.Array) -> jax.Array:
        """Rows, and `other` where an index is out of bounds."""
        inside = self._is_inside().reshape(self.indices.shape[:-1])
        batch = [d for d in range(rows.ndim) if d not in self.dims.offset_dims]
        return jnp.where(lax.broadcast_in_dim(inside, rows.shape, batch), rows, other)

    def rows(self, depth: int) -> jax.Array:
        """The row ids `[count, depth]` that are read; out of bounds where none is."""
        is_unique = self.promises.unique_indices  # and padding keeps that
        columns, shape = self._columns(range(depth)), tuple(self.shape)
        limits = np.asarray(self._limits, self._starts.dtype)
        return _padded(columns, self._starts, limits, shape=shape, is_unique=is_unique)

    def windows(self, rows: jax.Array, depth: int) -> jax.Array:
        """What the lookup reads, of whole rows `[count, *shape[depth:]]` one by one.

        Linear in the rows: its transpose puts the cotangent of the result into rows.
        """
        if self.window[depth:] != self.shape[depth:]:
            # A part of each row: gather it at the columns that the indices say, from
            # row 0 for the first index, row 1 for the second, and so on.
            rest = [axis for axis in range(depth, len(self.shape)) if axis in self.axes]
            slot = jnp.arange(self.count, dtype=self._starts.dtype)[:, None]
            numbers = lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rows.ndim)),
                collapsed_slice_dims=(0,),
                start_index_map=(0, *(1 + axis - depth for axis in rest)),
            )
            place = jnp.concatenate([slot, self._columns(rest)], axis=1)
            sizes = (1, *self.window[depth:])
            rows = lax.gather(rows, place, numbers, sizes, mode=Mode.CLIP)
        # `rows` has the axes of the indices in front, then those of a window, which lie
        # at `inner` in the result. `t[ids]` with ids [5, 3] has (2,): nothing moves.
        inner = self.dims.offset_dims
        order = [axis for axis in range(len(self.out)) if axis not in inner]
        order += inner
        rows = rows.reshape([self.out[axis] for axis in order])
        return jnp.transpose(rows, [order.index(axis) for axis in range(len(order))])

    @functools.cached_property
    def _starts(self) -> jax.Array:
        """`[count, len(axes)]`; a batching dimension has a column, which counts.

        A `vmap` over tables and ids is a lookup of `tables[b, ids[b]]`.
        """
        # For tables [5, 100, 8] and ids [5, 3], `axes` is (0, 1), and the starts are
        # `[[0, ids[0, 0]], [0, ids[0, 1]], ..., [4, ids[4, 2]]]`: 15 rows of two
        # indices.
        dims = self.dims.start_indices_batching_dims
        columns = [_counted(self.indices[..., :1], dim) for dim in dims]
        starts = jnp.concatenate([*columns, self.indices], axis=-1)
        starts = starts.reshape(self.count, len(self.axes))
        clamps = self.params["mode"] == Mode.CLIP
        return _start_ids(starts, self._limits, clamps=clamps)

    @property
    def _limits(self) -> list[int]:
        return [self.shape[axis] - self.window[axis] for axis in self.axes]

    def _columns(self, axes: Iterable[int]) -> jax.Array:
        places = [self.axes.index(x) for x in axes]
        if places == [*range(len(self.axes))]:  # as of `table[ids]`
            return self._starts
        return self._starts[:, np.asarray(places, int)]

    def _is_inside(self) -> jax.Array:
        """Whether each index starts a window that lies in the table."""
        limits = _as_ids(self._limits, self._starts.dtype)
        return _are_inside(self._starts, limits)


def _counted(indices: jax.Array, dim: int) -> jax.Array:
    """Numbers along an axis, which lie over Explicit axes as indices do."""
    numbers = lax.broadcasted_iota(indices.dtype, indices.shape, dim)
    return numbers + jnp.zeros_like(indices)


def _collapsed(dims: Any, one: Sequence[int]) -> Any:
    """The dimension numbers for an array that has length 1 along these axes.

    A batching dimension has one length in the array and in the indices: along an axis
    of length 1, which stands for all columns, it is index 0 of a collapsed one.
    """
    names = "operand_batching_dims", "start_indices_batching_dims"
    pairs = zip(*(getattr(dims, name) for name in names), strict=True)
    kept = [pair for pair in pairs if pair[0] not in one]
    moved = {*dims.operand_batching_dims} - {axis for axis, _ in kept}
    return dims._replace(
        collapsed_slice_dims=(*sorted({*dims.collapsed_slice_dims} | moved),),
        **{name: tuple(pair[k] for pair in kept) for k, name in enumerate(names)},
    )


def _are_inside(starts: jax.Array, limits: Any) -> jax.Array:
    return jnp.all((starts >= 0) & (starts <= limits[None]), axis=-1)


@functools.partial(compiled, static_argnames=("shape", "is_unique"))
def _padded(
    columns: jax.Array,
    starts: jax.Array,
    limits: np.ndarray,
    *,
    shape: tuple[int, ...],
    is_unique: bool,
) -> jax.Array:
    """The columns of indices, out of bounds where their window is."""
    inside = _are_inside(starts, limits)
    if is_unique:
        slot = jnp.arange(len(columns), dtype=jnp.int32)
        return pad_indices(columns, inside, slot, shape)
    return jnp.where(inside[:, None], columns, row_bounds(shape, columns))


def reads_rows(lookup: Lookup) -> bool:
    """Whether a lookup reads rows, of which a gradient can be made.

    With batching dimensions, rows and not single elements: these would be
    `take_along_axis` and `sort`, which read about as many as the table holds.
    """
    is_batched = bool(lookup.dims.operand_batching_dims)
    return 0 < lookup.depth < len(lookup.shape) + (not is_batched)


def lookup_of_rows(
    shape: tuple[int, ...],
    ids: Any,
    bounds: Bounds = ZEROS,
    sharding: NamedSharding | None = None,
) -> Lookup:
    """`table[ids]`, no id from the end; by default zeros are out of bounds."""
    rank = len(ids.shape)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(rank, rank + len(shape) - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    params = _params(numbers, (1, *shape[1:]), bounds)
    indices: Any = jax.ShapeDtypeStruct((*ids.shape, 1), ids.dtype)
    if isinstance(ids, jax.Array):  # in a plan only its type
        indices = ids[..., None]
    out = (*ids.shape, *shape[1:])
    padded = bounds.is_padded
    return Lookup(shape, out, params, indices, sharding=sharding, is_padded=padded)


def lookup_of_gather(eqn: JaxprEqn, shape: tuple[int, ...], indices: Any) -> Lookup:
    """What a gather reads; windows of several rows that are clamped, row by row."""
    out: Any = eqn.outvars[0].aval
    lookup = Lookup(shape, out.shape, eqn.params, indices)
    dims, window = lookup.dims, lookup.window
    # Windows of rows, but not of all: the axis of rows is the first of the offsets in
    # the result, and becomes the last of the indices there.
    batches = dims.operand_batching_dims
    row = next((axis for axis in range(len(shape)) if axis not in batches), 0)
    if (
        eqn.params["mode"] != Mode.CLIP
        or row not in dims.start_index_map
        or window[row] in (0, 1, shape[row])
        or dims.offset_dims[0] != indices.ndim - 1
    ):
        return lookup
    dims = dims._replace(
        offset_dims=dims.offset_dims[1:],
        collapsed_slice_dims=(row, *dims.collapsed_slice_dims),
    )
    count, axes = window[row], dims.start_index_map
    sizes = tuple(1 if axis == row else size for axis, size in enumerate(window))
    params = _params(dims, sizes, Bounds())
    if isinstance(indices, jax.Array | np.ndarray):
        limits = [shape[axis] - window[axis] for axis in axes]
        starts = _start_ids(jnp.asarray(indices), limits, clamps=True)
        indices = _row_by_row(starts, count, axes.index(row))
    else:  # in a plan only its type
        *batch, width = indices.shape
        indices = jax.ShapeDtypeStruct((*batch, count, width), jnp.int32)
    return Lookup(shape, out.shape, params, indices, sharding=_sharding(eqn))


def lookup_of_slice(
    eqn: JaxprEqn, shape: tuple[int, ...], starts: Sequence[Any] | None
) -> Lookup | None:
    """Which rows a slice reads; `None` if it reads all of them, or several constant.

    `starts` is where a dynamic slice begins, `()` for others, and in a plan `None`.
    """
    out: Any = eqn.outvars[0].aval
    window, constant = out.shape, None
    if not shape or window[0] == 0 or window[0] == shape[0] > 1:
        return None
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"] or (1,) * len(shape)
        if window[0] != 1 or set(strides[1:]) - {1}:
            return None
        constant = int(eqn.params["start_indices"][0])
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, len(window))),
        collapsed_slice_dims=(0,),
        start_index_map=tuple(range(len(window))),
    )
    params = _params(numbers, (1, *window[1:]), Bounds())
    indices: Any = jax.ShapeDtypeStruct((window[0], len(window)), jnp.int32)
    if starts is not None:
        starts = starts or [*map(jnp.uint32, eqn.params["start_indices"])]
        indices = _indices_of_slice(shape, window, starts)
    return Lookup(shape, window, params, indices, constant, _sharding(eqn))


def _sharding(eqn: JaxprEqn) -> NamedSharding | None:
    """Of the result, if Explicit axes split the table."""
    table: Any = eqn.invars[0].aval
    out: Any = eqn.outvars[0].aval
    is_split = any(partitions_of(table.sharding.spec))
    return out.sharding if is_split and out.sharding.mesh.explicit_axes else None


def _params(numbers: Any, sizes: Any, bounds: Bounds) -> dict[str, Any]:
    names = "mode", "fill_value", "indices_are_sorted", "unique_indices"
    of_bounds = dict(zip(names, bounds, strict=False))
    return {"dimension_numbers": numbers, "slice_sizes": sizes, **of_bounds}


def _indices_of_slice(
    shape: Sequence[int], window: Sequence[int], starts: Sequence[Any]
) -> jax.Array:
    """Where a slice reads, row by row; as `dynamic_slice` does, it is clamped."""
    limits = [size - part for size, part in zip(shape, window, strict=True)]
    first = _start_ids(jnp.stack([*map(jnp.asarray, starts)]), limits, clamps=True)
    return _row_by_row(first, window[0], 0)


def _row_by_row(starts: jax.Array, count: int, column: int) -> jax.Array:
    """Indices `[..., count, k]` of windows' rows, which `column` of the starts says."""
    step = np.zeros((count, starts.shape[-1]), starts.dtype)
    step[:, column] = np.arange(count)
    return starts[..., None, :] + np.expand_dims(step, tuple(range(starts.ndim - 1)))


def _start_ids(indices: jax.Array, limits: list[int], *, clamps: bool) -> jax.Array:
    """Indices `[..., k]` in the type that all ids have from here on, clamped or not."""
    known = [x for x in limits if isinstance(x, int)]  # not those of `jax.export`
    indices = narrow_ids(indices, max(known, default=0) + 1)
    if not clamps:
        return indices
    last = _as_ids(limits, indices.dtype)
    last = last.reshape((1,) * (indices.ndim - 1) + last.shape)
    return jnp.clip(indices, jnp.zeros_like(last), last)


def _as_ids(sizes: Sequence[Any], dtype: Any) -> Any:
    """Sizes in a type of ids, which has a largest number: `[len(sizes)]`."""
    if all(isinstance(x, int) for x in sizes):
        return np.minimum(sizes, jnp.iinfo(dtype).max).astype(dtype)
    # A symbolic size, of `jax.export`, is a number of the program.
    return jnp.stack([jnp.asarray(x, dtype) for x in sizes])
