"""Which rows a batch looks up: a small program, sliced out of the loss."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from .._gradients.evaluate import evaluate
from .._jax_extras.cpu_device import cpu_device
from .._jax_extras.jaxprs import FlatJaxpr, run_equations
from ._arguments import (
    is_committed,
    is_key,
    is_over_explicit_axes,
    layout,
    mesh_around,
    refuse_of_one_process,
    refuse_other_devices,
    refuse_other_numbers,
    refuse_others,
    refuse_traced,
    taken_by,
    target_of,
    type_of,
)
from ._callbacks import zeros_in_place_of
from ._compact import LARGEST_ID, Whole, evaluate_compact, fingerprint
from ._dead_code import kept_arguments, without_dead_code
from ._plan import Plan
from ._reset import Reset
from ._residuals import Number
from ._store import Ascending, ascending
from ._way_to_ids import WayToIds


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
      residuals: What is computed of floats on the way, which a step takes over, as it
        may round otherwise; by the numbers of `_residuals.py`.
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
    residuals: Mapping[Number, jax.Array]
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
        """Whether a number is among the integers that were given."""
        leaves = (x for x in jax.tree.leaves(self.args) if hasattr(x, "dtype"))
        arrays = (x for x in leaves if jnp.issubdtype(x.dtype, jnp.integer))
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
                # Those above the number of rows are one more than they are, if int32
                # has one more. (Of floats, infinity is the largest.)
                least, most = int(ids.min()), int(ids.max())
                is_itself = most == LARGEST_ID and not self._has(most - 1)
                row = least - size if least < 0 else most - (not is_itself)
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

    def __init__(self, fun: Callable[..., Any], plan: Plan):
        self._lines: dict[str, set[str]] = {}  # where tables are looked up
        self._fun, self._plan, self._tables = fun, plan, plan.tables
        self._programs: dict[Any, tuple[Any, list[int], bool]] = {}

    def __call__(
        self,
        rest: Sequence[Any],
        args: Any,
        static: Mapping[str, Any],
        name: str,
        target: Any = None,
    ) -> Batch:
        """Begins to compute the ids of a batch.

        Args:
          rest: What has no rows: the other parameters, and then of the state, which
            alone says where a trainer of tables alone has trained.
          args: Further arguments: a tuple, and a dictionary of those by keyword.
          static: Arguments by keyword that are not traced.
          name: Of the batch, for errors.
          target: Where rows go, if batches before it have said so.

        Raises:
          IndexError: If ids are computed of integers that JAX would take for others.
          TypeError: For a tensor of another library; for a traced array.
          ValueError: For an array on other devices than the parameters.
        """
        whole_batch, held = jax.tree.leaves(args), self._plan.read_by_loss(rest)
        for x in whole_batch:
            refuse_traced(x, name)
        target = target or target_of([*rest, *whole_batch])
        committed = [x.sharding for x in rest if is_committed(x)]
        for x in filter(is_committed, whole_batch):
            trained_on = [*committed, self._plan.spread.whole or target][0]
            refuse_other_devices(x, trained_on, name)
        # What the optimiser alone takes is nothing to the loss.
        taken = args[0], taken_by(self._fun, args[1])
        leaves, structure = jax.tree.flatten(taken)
        static_taken = taken_by(self._fun, static)
        for x in leaves:
            refuse_others(x, name)
        # With weak types: an int8 times a Python number is an int8. A parameter that is
        # a Python number has such a type until a step updates it.
        avals = tuple((type_of(x), layout(x)) for x in leaves)
        are_weak = tuple(getattr(x, "weak_type", False) for x in held)
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        key = structure, avals, are_weak, tuple(sorted(static_taken.items())), x64
        traced = self._programs.get(key) or self._trace(
            held, leaves, structure, static_taken
        )
        program, kept, needs_params = traced
        values = [*held, *leaves]
        operands = [values[i] for i in kept]
        for x in operands:
            refuse_other_numbers(x, name)
            refuse_of_one_process(x, name)
        # What lies on a mesh stays there, and runs there.
        if jax.default_backend() != "cpu" and mesh_around(values) is None:
            operands = jax.device_put(operands, cpu_device())
        ids, residuals, number = program(*operands)
        self._programs[key] = traced  # see `Program`
        return Batch(
            *(args, static, name, ids, number),
            needs_params=needs_params,
            residuals=residuals,
            tables=list(self._tables.values()),
            lines=self._lines,
            target=target,
        )

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
        held: Sequence[Any],
        leaves: list[Any],
        structure: Any,
        static: Mapping[str, Any],
    ) -> tuple[Any, list[int], bool]:
        """The program, what of `held` and batch it reads, and whether of `held`."""
        count, num_held = len(self._tables), len(held)
        num_dense = self._plan.num_dense
        numbers: list[Number] = []

        def ids(rows: list[Any], *values: Any) -> list[jax.Array]:
            params, _ = self._plan.params_and_state(values[:num_dense], rows)
            args, keywords = jax.tree.unflatten(structure, values[num_dense:])
            fun = functools.partial(self._fun, **keywords, **static)
            result, looked_up, walk, lines = evaluate_compact(
                fun, self._tables, params, None, args, {}
            )
            for name, new_lines in lines.items():
                self._lines.setdefault(name, set()).update(new_lines)
            numbers[:] = walk.computed
            leaves = (x for x in jax.tree.leaves(result) if isinstance(x, jax.Array))
            return [*looked_up, *leaves, *walk.computed.values()]

        rows = [
            jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            for x in self._tables.values()
        ]
        shapes = [
            jax.ShapeDtypeStruct(
                *type_of(x)[:2], weak_type=type_of(x)[2], sharding=layout(x)
            )
            for x in [*held, *leaves]
        ]
        args = [*rows, *shapes[:num_dense], *shapes[num_held:]]
        try:
            closed = jax.make_jaxpr(ids)(rows, *args[count:])
        except ValueError as error:
            if any(map(is_over_explicit_axes, leaves)):
                error.add_note(
                    "A batch is split over Explicit axes, which jax.make_mesh makes: "
                    "pass (jax.sharding.AxisType.Auto,) * axes to it; or say in the "
                    "loss how rows lie, table.at[ids].get(out_sharding=...), with "
                    "jax.set_mesh(mesh) around."
                )
            raise
        # Ids alone say what is refused, and what is read.
        ids_alone = _without_refs(_results(closed, range(count)), args)
        exported = without_dead_code(ids_alone, args)
        reads = list(exported.module_kept_var_idx)
        self._refuse_reads(ids_alone, exported)

        def depends_on(place: int) -> list[int] | None:
            alone = _without_refs(_results(closed, [place]), args)
            exported = without_dead_code(alone, args)
            is_once = f"@{zeros_in_place_of('io_callback')}" in exported.mlir_module()
            return None if is_once else list(exported.module_kept_var_idx)

        first = len(closed.jaxpr.outvars) - len(numbers)
        params = range(count, count + num_dense)
        batch = range(count + num_dense, len(args))
        asked = closed, count, first - count, reads, params, batch, depends_on
        places, more = WayToIds(*asked).residuals()
        sources = [*dict.fromkeys(places.values())]
        residuals = {numbers[i - first]: sources.index(j) for i, j in places.items()}
        closed = _without_refs(_results(closed, [*range(count), *sources]), args)
        zeros = [np.zeros(x.shape, x.dtype) for x in rows]

        def now(*values: Any) -> list[Any]:
            # Of tables on the device rows are read, too, and are those of now.
            params, state = self._plan.params_and_state(values[:num_held], zeros)

            def of_params(params: Any, *batch: Any) -> list[Any]:
                dense = self._plan.dense_of(params)
                return jaxpr_as_fun(closed)(*zeros, *dense, *batch)

            return evaluate(of_params, read=state)(params, *values[num_held:])

        kept = [i - count for i in sorted({*reads, *more})]
        if num_held > num_dense:
            kept = kept_arguments(now, shapes)
        needs_params = any(i < num_held for i in kept)
        # A random key has no zeros to stand for it.
        kept += [i for i, x in enumerate(shapes) if is_key(x) and i not in kept]

        whole: Any = None
        if jax.process_count() > 1 and kept:  # each reads all ids
            mesh = mesh_around([[*held, *leaves][i] for i in kept])
            whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())

        @functools.partial(jax.jit, out_shardings=(whole, None, whole))
        def program(*operands: Any) -> tuple[Any, Any, Any]:
            by_place = dict(zip(kept, operands, strict=True))
            values = [
                by_place[i] if i in by_place else jnp.zeros(x.shape, x.dtype)
                for i, x in enumerate(shapes)
            ]
            results = now(*values)
            ids, values = results[:count], results[count:]
            return ids, {x: values[i] for x, i in residuals.items()}, fingerprint(ids)

        return program, kept, needs_params


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


def _results(closed: ClosedJaxpr, places: Sequence[int]) -> ClosedJaxpr:
    """The program of some results."""
    outvars = [closed.jaxpr.outvars[i] for i in places]
    return ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts)


def _without_refs(closed: ClosedJaxpr, args: Sequence[Any]) -> ClosedJaxpr:
    """The program without the mutable arrays of others, which a step may write once.

    Raises:
      ValueError: If results depend on them, or on any mutable array beside them.
    """
    if not any(isinstance(x, jax.Ref) for x in closed.consts):
        return closed
    program = FlatJaxpr(closed)
    equations, _ = program.slice(program.outputs)
    for eqn, *_ in equations:
        if any(hasattr(x.aval, "inner_aval") for x in (*eqn.invars, *eqn.outvars)):
            line = source_info_util.summarize(eqn.source_info)
            raise ValueError(
                "Rows of tables in host memory are fetched before the function runs, "
                "so ids must not depend on a mutable array (`jax.new_ref`) that it "
                f"closes over, or on another one beside it; they do at {line}. Read it "
                "before, ref[...], and pass ids, or what they are computed of, in the "
                "batch."
            )

    def ids(*args: Any) -> list[Any]:
        known = program.literals | program.consts | dict(enumerate(args))
        values = run_equations(equations, known)
        return [values[i] for i in program.outputs]

    return jax.make_jaxpr(ids)(*args)
