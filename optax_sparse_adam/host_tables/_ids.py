"""Which rows a batch looks up: a small program, sliced out of the loss."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._gradients.tracing import jit_enabled
from .._jax_extras.cpu_device import cpu_device
from .._rows.checks import refuse_masked
from ._compact import (
    Whole,
    evaluate_compact,
    fingerprint,
    without_callbacks,
    zeros_in_place_of,
)
from ._reset import Reset
from ._store import Ascending, ascending

_NOT_OF_ALL = (
    "{name} has an argument of which rows are computed, and which need not be the same "
    "in all processes: {x!r}. Give a global array: jax.make_array_from_process_local_"
    "data(sharding, part_of_this_process), or jax.device_put(x, NamedSharding(mesh, "
    "PartitionSpec())) for what all of them have."
)


@dataclasses.dataclass
class Batch:
    """A batch whose ids are being computed.

    Attributes:
      args: The batch, and arguments by keyword that are traced.
      static: Arguments by keyword that are not.
      name: For errors.
      ids: Of each table, `[n]` with duplicates, as `_compact` says.
      fingerprint: Of all of them.
      needs_params: Whether ids depend on parameters; then those of a later step do not
        exist.
      tables: What is looked up.
      lines: Where, for each of them.
      target: Where rows go: a device, or all of the batch's mesh.
      item: The batch as it was drawn, by `run`.
      reset: Rows that begin again before its step.
    """

    args: tuple[tuple[Any, ...], dict[str, Any]]
    static: Mapping[str, Any]
    name: str
    ids: list[jax.Array]
    fingerprint: jax.Array
    needs_params: bool
    tables: Sequence[Whole]
    lines: Mapping[str, set[str]]
    target: Any
    item: Any = None
    reset: Reset | None = None

    @functools.cached_property
    def in_bounds(self) -> list[Ascending]:
        """The rows that are looked up, and those that begin again."""
        begun = [None] * len(self.ids) if self.reset is None else self.reset.rows
        triples = zip(self.ids, begun, self.tables, strict=True)
        return [
            ascending(
                np.asarray(ids) if more is None else np.append(ids, more),
                whole.shape[0],
            )
            for ids, more, whole in triples
        ]

    def _has(self, number: int) -> bool:
        """Whether a number is among those of uint32 that were given."""
        leaves = jax.tree.leaves(self.args)
        arrays = (x for x in leaves if getattr(x, "dtype", None) == np.uint32)
        here = (x for x in arrays if getattr(x, "is_fully_addressable", True))
        return any(np.any(np.asarray(x) == number) for x in here)

    def rows(self) -> list[Ascending]:
        """The rows that are looked up, and those that begin again.

        Raises:
          IndexError: If an id is out of bounds where the lookup promises that none is.
        """
        for each, whole in zip(self.ids, self.tables, strict=True):
            ids, size = np.asarray(each), whole.shape[0]
            if len(ids) and (ids.min() < 0 or ids.max() > size):
                places = ", ".join(sorted(self.lines.get(whole.name, ())))
                # Those above the number of rows are one more than they are.
                least, most = int(ids.min()), int(ids.max())
                row = least - size if least < 0 else most - 1
                # JAX takes an id of uint32 for one of int32.
                row = least + 2**32 if self._has(least + 2**32) else row
                raise IndexError(
                    f"{self.name} looks up row {row} of {whole.name}, which has "
                    f"{size:,} rows, at {places}. Give rows from 0 to {size - 1:,}; "
                    "where an id may be out of bounds, say so by "
                    'table.at[ids].get(mode="fill") or mode="clip".'
                )
        return self.in_bounds


class RowIds:
    """The ids that a function looks up, computed on the host's CPU.

    What the function computes beside ids is no part of the program, and arguments that
    ids do not depend on are not sent there. On an accelerator it would also wait for
    the step before.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        tables: Mapping[int, Whole],
        treedef: Any,
        mesh: NamedSharding | None,
    ):
        self._lines: dict[str, set[str]] = {}  # where tables are looked up
        self._fun, self._tables, self._treedef = fun, tables, treedef
        self._mesh = mesh
        self._programs: dict[Any, tuple[Any, list[int]]] = {}

    def __call__(
        self,
        dense: Sequence[Any],
        args: Any,
        static: Mapping[str, Any],
        name: str,
        target: Any = None,
    ) -> Batch:
        """Begins to compute the ids of a batch.

        Args:
          dense: The leaves of the parameters that are no tables.
          args: Further arguments: a tuple, and a dictionary of those by keyword.
          static: Arguments by keyword that are not traced.
          name: Of the batch, for errors.
          target: Where rows go, if batches before it have said so.

        Raises:
          IndexError: If ids are computed of integers that JAX would take for others.
          TypeError: For a tensor of another library.
          ValueError: For an array on other devices than the parameters.
        """
        whole_batch = jax.tree.leaves(args)
        target = target or target_of([*dense, *whole_batch])
        committed = [x.sharding for x in dense if _is_committed(x)]
        for x in filter(_is_committed, whole_batch):
            _refuse_other_devices(x, [*committed, self._mesh or target][0], name)
        # What the optimiser alone takes is nothing to the loss.
        taken = args[0], self._taken(args[1])
        leaves, structure = jax.tree.flatten(taken)
        static_taken = self._taken(static)
        for x in leaves:
            _refuse_others(x, name)
        # With weak types: an int8 times a Python number is an int8.
        avals = tuple((_type_of(x), _layout(x)) for x in leaves)
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        key = structure, avals, tuple(sorted(static_taken.items())), x64
        if key not in self._programs:
            self._programs[key] = self._trace(dense, leaves, structure, static_taken)
        program, kept = self._programs[key]
        values = [*dense, *leaves]
        operands = [values[i] for i in kept]
        for x in operands:
            _refuse_other_numbers(x, name)
            if jax.process_count() > 1 and _layout(x) is None:
                raise ValueError(_NOT_OF_ALL.format(name=name, x=x))
        # What lies on a mesh stays there, and runs there.
        if jax.default_backend() != "cpu" and mesh_around(values) is None:
            operands = jax.device_put(operands, cpu_device())
        ids, number = program(*operands)
        return Batch(
            *(args, static, name, ids, number),
            needs_params=any(i < len(dense) for i in kept),
            tables=list(self._tables.values()),
            lines=self._lines,
            target=target,
        )

    def _taken(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        parameters = _parameters(self._fun) if keywords else {}
        if parameters is None or any(
            x.kind == x.VAR_KEYWORD for x in parameters.values()
        ):
            return dict(keywords)
        return {k: x for k, x in keywords.items() if k in parameters}

    def _refuse_reads(self, closed: ClosedJaxpr, exported: jax.export.Exported) -> None:
        """Raises where ids depend on rows, or on what happens once."""
        if f"@{zeros_in_place_of('io_callback')}" in exported.mlir_module():
            raise ValueError(
                "Rows of tables in host memory are fetched before the function runs, "
                "so ids must not depend on the result of an io_callback, which would "
                "be called twice. Compute ids before, and pass them in the batch; or "
                "by jax.pure_callback."
            )
        for i, table in enumerate(self._tables.values()):
            if i in exported.module_kept_var_idx:
                places = ", ".join(sorted(self._lines.get(table.name, ())))
                raise ValueError(
                    "Rows of tables in host memory are fetched before the function "
                    + _why_not(closed.jaxpr.eqns).format(table=table.name, at=places)
                )

    def _trace(
        self,
        dense: Sequence[Any],
        leaves: list[Any],
        structure: Any,
        static: Mapping[str, Any],
    ) -> tuple[Any, list[int]]:
        """The program, and which of dense parameters and batch it reads."""
        count, num_dense = len(self._tables), len(dense)

        def ids(rows: list[Any], *values: Any) -> list[jax.Array]:
            tables, left = iter(rows), iter(values[:num_dense])
            params = self._treedef.unflatten(
                next(tables if i in self._tables else left)
                for i in range(self._treedef.num_leaves)
            )
            args, keywords = jax.tree.unflatten(structure, values[num_dense:])
            fun = functools.partial(self._fun, **keywords, **static)
            _, looked_up, lines = evaluate_compact(
                fun, self._tables, params, None, args
            )
            for name, new_lines in lines.items():
                self._lines.setdefault(name, set()).update(new_lines)
            return looked_up

        rows = [
            jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            for x in self._tables.values()
        ]
        shapes = [
            jax.ShapeDtypeStruct(
                *_type_of(x)[:2], weak_type=_type_of(x)[2], sharding=_layout(x)
            )
            for x in [*dense, *leaves]
        ]
        closed = jax.make_jaxpr(ids)(rows, *shapes)
        exported = _without_dead_code(closed, [*rows, *shapes])
        reads = list(exported.module_kept_var_idx)
        self._refuse_reads(closed, exported)
        kept = [i - count for i in reads]
        # A random key has no zeros to stand for it.
        kept += [i for i, x in enumerate(shapes) if _is_key(x) and i not in kept]

        whole = None
        if jax.process_count() > 1 and kept:  # each reads all ids
            mesh = mesh_around([[*dense, *leaves][i] for i in kept])
            whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())

        @functools.partial(jax.jit, out_shardings=whole)
        def program(*operands: Any) -> tuple[list[jax.Array], jax.Array]:
            by_place = dict(zip(kept, operands, strict=True))
            values = [
                by_place[i] if i in by_place else jnp.zeros(x.shape, x.dtype)
                for i, x in enumerate(shapes)
            ]
            zeros = [jnp.zeros(x.shape, x.dtype) for x in rows]
            ids = jaxpr_as_fun(closed)(*zeros, *values)
            return ids, fingerprint(ids)

        return program, kept


def _why_not(eqns: Sequence[Any]) -> str:
    """Why a program of ids reads rows."""
    effects = {type(effect).__name__ for eqn in eqns for effect in eqn.effects}
    if effects & {"InternalMutableArrayEffect", "WriteEffect"}:  # without public names
        return (
            "runs, so it must be seen which ids it computes without them. Here a "
            "mutable array (`jax.new_ref`) is written, and what is written is not "
            "followed: ids may depend on rows of {table}, which is looked up at {at}. "
            "Return what is computed of rows, or carry it through the loop, in place "
            "of writing it to a mutable array."
        )
    return (
        "runs, so ids must not depend on rows, but some depend on {table}, which is "
        "looked up at {at}. Compute ids from the batch; or, in two calls, evaluate "
        "first and look up then."
    )


def _parameters(fun: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Of a function, or `None` of one that Python cannot look into."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None


def split_keywords(
    fun: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that `make_train_step` traces, and those that it does not: see there."""
    parameters = (_parameters(fun) if keywords else None) or {}
    static = {
        name: x
        for name, x in keywords.items()
        if name in parameters and isinstance(parameters[name].default, bool | str)
    }
    return {k: x for k, x in keywords.items() if k not in static}, static


def kept_arguments(fun: Callable[..., Any], args: Sequence[Any]) -> list[int]:
    """Which arguments a function reads, after its dead code is removed."""
    return list(
        _without_dead_code(jax.make_jaxpr(fun)(*args), args).module_kept_var_idx
    )


def _without_dead_code(closed: ClosedJaxpr, args: Sequence[Any]) -> jax.export.Exported:
    # What has callbacks cannot be exported.
    names = "pure_callback", "io_callback", "debug_callback"
    program = ClosedJaxpr(without_callbacks(closed.jaxpr, names), closed.consts)
    with jit_enabled():
        fun = jax.jit(jaxpr_as_fun(program))
        return jax.export.export(fun, platforms=["cpu"])(*args)


def _refuse_others(x: Any, batch: str) -> None:
    refuse_masked(x, f"HostTrainer, in {batch},")
    if hasattr(x, "detach"):
        raise TypeError(
            f"{batch} has a {type(x).__module__}.{type(x).__qualname__}; HostTrainer "
            "takes arrays of NumPy and JAX. Give x.numpy(), which shares its memory; "
            "of a loader of torch, give collate_fn= a function that makes tuples of "
            "NumPy arrays."
        )


def _is_committed(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.committed


def _refuse_other_devices(x: jax.Array, trained_on: Any, batch: str) -> None:
    """JAX moves no array that was put on a device; of a mesh the order counts."""
    here, there = _devices_of(x.sharding), _devices_of(trained_on)
    if here != there:
        raise ValueError(
            f"{batch} has {x.dtype}{list(x.shape)} on {[*map(str, here)]}, and "
            f"HostTrainer trains on {[*map(str, there)]}, where its `mesh` or its "
            "parameters are, or where its first batch was. jax.device_put it there, "
            "as with a NamedSharding of the same mesh; or give an array of NumPy."
        )


def _devices_of(sharding: Any) -> list[Any]:
    if isinstance(sharding, NamedSharding):
        return [*sharding.mesh.devices.flat]
    return [*sharding.device_set]


def _refuse_other_numbers(x: Any, batch: str) -> None:
    """JAX takes 2**32 + 5 for 5 where an array of NumPy is wider than its integers."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu":
        return
    held: Any = jax.dtypes.canonicalize_dtype(x.dtype)
    if held.itemsize < x.dtype.itemsize and np.any(x.astype(held) != x):
        number = int(np.asarray(x)[x.astype(held) != x].flat[0])
        raise IndexError(
            f"{batch} has the integer {number}, of which rows are computed, and which "
            f"JAX takes for {np.asarray(number, x.dtype).astype(held)}, as it computes "
            f"in {held} unless jax_enable_x64 is set. Give rows that {held} holds; for "
            f"a hash of numbers that it does not hold, say .astype(np.{held}) first."
        )


def _type_of(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    aval: Any = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type


def _layout(x: Any) -> Any:
    """The sharding of an array on several devices."""
    is_spread = isinstance(x, jax.Array) and len(x.devices()) > 1
    return x.sharding if is_spread else None


def mesh_around(leaves: Sequence[Any]) -> Any:
    """The mesh that arrays lie on, or that is set, or `None`."""
    for sharding in filter(None, map(_layout, leaves)):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                "HostTrainer takes parameters and batches on one device, or with a "
                f"NamedSharding on a mesh; got {sharding}."
            )
        return sharding.mesh
    return None if jax.sharding.get_mesh().empty else jax.sharding.get_mesh()


def target_of(leaves: Sequence[Any]) -> Any:
    """Where rows go: to all devices of a mesh, or to the device of the parameters."""
    if (mesh := mesh_around(leaves)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    one = next(filter(_is_committed, arrays), arrays[0] if arrays else jnp.zeros(()))
    return SingleDeviceSharding(next(iter(one.devices())))


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))
