"""Differentiates a program with respect to the rows that it looks up.

A walk evaluates the jaxpr of the loss with an `Expression` in the place of each table.
At each lookup it injects a *delta*, zeros with respect to which JAX then differentiates
(`_jax_extras.inject`), and keeps the row ids beside it:

    rows = f(inject(gather(table, ids), delta))

The cotangent of `delta` is the gradient of the rows, and `(ids, cotangent)` is the
gradient of the table. Flax calls this `perturb`. JAX differentiates as always, and
`rules` says what a primitive does to tables on the way *forward*. The loss
`sum(tanh(2 * t)[ids] ** 2)`, equation by equation:

    a = mul t 2.0              an Expression: nothing is computed yet
    b = tanh a                 an Expression
    c = gather b ids           tanh(2 * inject(t[ids], delta)), an array
    d = integer_pow c          an array
    e = reduce_sum d           the loss

All deltas are arguments of the function that JAX differentiates, so their number and
shapes must be known before. A first walk, the *plan*, evaluates nothing: it follows the
tables only, and collects a `Request` for each delta. The walk itself then visits the
same lookups in the same order and takes one delta for each.

Primitives with jaxprs inside that JAX traces by itself hand deltas on: a scan whose
body looks up `n` rows in each of `L` steps requests `L * n` rows outside, and gives
each step its own (`rules_calls`, `rules_shard_map`).

A primitive without a rule gets the table as an array. If the loss needs the result, the
gradient of that leaf is dense (`Program.dense_uses` says why), and the leaf is an
ordinary argument of what JAX differentiates.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import evaluate_eqn, name_and_params
from .._rows.lookups import reads_by_kernel
from .._rows.source import Bounds, Source
from .backward_slice import CALLS, BackwardSlice, as_closed, computed, forwarded
from .expressions import Expression, Leaf, table
from .lookups import Lookup, Promises
from .refs import begun_with, makes_ref
from .row_slices import LookupEntries

Results = Any  # what a rule returns: a list, or NotImplemented
Rule = Callable[..., Results]


class Bags(NamedTuple):
    """Of a delta with a row for each bag: what one call of the lookup reads.

    Attributes:
      entries: How many ids, of all bags.
      bags: How many of them.
      dtype: Of their sums.
      has_weights: Whether entries have weights.
      is_regular: Whether all bags have as many entries, one bag's after another's.
    """

    entries: int
    bags: int
    dtype: Any
    has_weights: bool
    is_regular: bool


class Request(NamedTuple):
    """A delta that a walk needs, and the entries that it returns for it.

    Attributes:
      leaf: Of the table.
      shape: The table's.
      count: How many rows are looked up.
      depth: How many leading axes of the table are the index of a row.
      axes: Mesh axes over which the rows vary.
      is_whole: Whether the leaf has one delta of its own shape in place of those of its
        lookups, in `Walk.whole_deltas`. That of a lookup then has no columns.
      constant: The row, if it is the same in each call.
      bags: For sums of rows; `count` is then the number of bags.
      promises: What holds of the ids of one call.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment]  # tuple has a method count
    depth: int
    axes: tuple[str, ...] = ()
    is_whole: bool = False
    constant: int | None = None
    bags: Bags | None = None
    promises: Promises = Promises()

    @property
    def num_entries(self) -> int:
        if self.bags is None or self.bags.bags == 0:
            return self.count
        # In a loop there are `count // bags` calls, each with so many entries.
        return self.count // self.bags.bags * self.bags.entries

    @property
    def delta(self) -> jax.ShapeDtypeStruct:
        row = (0,) if self.is_whole else self.shape[self.depth :]
        dtype = self.leaf.dtype if self.bags is None else self.bags.dtype
        return jax.ShapeDtypeStruct((self.count, *row), dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """What holds for all walks over one program.

    Attributes:
      rules: The rule of each primitive, by name.
      slice: Says what the loss depends on.
      depths: For each leaf, how many leading axes are the index of a row; the smallest
        number that one of its lookups indexes. Known after a first plan.
      whole_leaves: Those with one delta of their own shape: see `differentiate`.
      dense_uses: For each leaf its first use other than lookups, as plans find them:
        the operation, and the user's line.
      plans: Of jaxprs, for each kind of arguments.
      calls: The equations that a walk is in, the innermost last.
      reread: Leaves of which the backward pass looks rows up once more.
    """

    rules: Mapping[str, Rule]
    slice: BackwardSlice = dataclasses.field(default_factory=BackwardSlice)
    depths: dict[int, int] = dataclasses.field(default_factory=dict)
    whole_leaves: set[int] = dataclasses.field(default_factory=set)
    dense_uses: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict)
    calls: list[JaxprEqn] = dataclasses.field(default_factory=list)
    reread: set[int] = dataclasses.field(default_factory=set)

    def constant(self, array: Any) -> Any:
        """An array that the program holds, as `Walk.evaluate` takes it."""
        return _constant(array)


class Walk:
    """One evaluation of a jaxpr, or the plan of one.

    Attributes:
      program: What holds for all walks.
      whole_deltas: The deltas of leaves that have one of their own shape.
      requests: The deltas that this walk needs, in order; in a plan.
      entries: The entries of each delta, in the same order.
    """

    def __init__(
        self,
        program: Program,
        deltas: Iterator[jax.Array] | None = None,
        whole: Mapping[Leaf, jax.Array] | None = None,
    ):
        self.program = program
        self.whole_deltas = whole or {}
        self.requests: list[Request] = []
        self.entries: list[LookupEntries] = []
        self._deltas = deltas
        self._memo: dict[Any, jax.Array] = {}  # of this trace alone
        self._step: Sequence[Any] | None = None  # what a step of a loop gets

    @property
    def is_plan(self) -> bool:
        return self._deltas is None

    def plan(
        self, closed: ClosedJaxpr, args: Sequence[Any]
    ) -> tuple[list[Request], list[Any]]:
        """The deltas that a jaxpr needs, and its results: expressions, or `None`.

        Plans are kept: a loop in a loop is planned for the plan of the outer one, for
        the outer one, and for each walk over its body.
        """
        kinds = tuple(x.kind if isinstance(x, Expression) else None for x in args)
        key = id(closed.jaxpr), kinds
        if key not in self.program.plans:
            walk = Walk(self.program)
            unknown = [None if kind is None else Expression(*kind) for kind in kinds]
            # A result that is an argument, such as a carried table, is another table in
            # each call: the plan keeps its place. (`index` would compare arrays.)
            places = [
                next((i for i, y in enumerate(unknown) if y is x), x)
                if isinstance(x, Expression)
                else None
                for x in walk.evaluate(closed, unknown)
            ]
            # The jaxpr stays alive as long as its `id` is a key.
            self.program.plans[key] = walk.requests, places, closed.jaxpr
        requests, places, _ = self.program.plans[key]
        return requests, [args[x] if isinstance(x, int) else x for x in places]

    def evaluate_inside(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        deltas: Sequence[jax.Array],
        keep: Sequence[int] | None = None,
        whole: Mapping[Leaf, jax.Array] | None = None,
        beside: Sequence[Any] | None = None,
    ) -> tuple[list[Any], list[LookupEntries]]:
        """The results of a jaxpr in a function that JAX traces by itself, as arrays.

        Those of the indices `keep`, if there are any; and the entries of all deltas.
        `beside` is what else a step of a loop gets, if this is one.
        """
        whole = self.whole_deltas if whole is None else whole
        # A walk of its own, whose memo holds no tracers of the trace around.
        walk = Walk(self.program, iter(deltas), whole)
        if beside is not None:
            walk._step = [*deltas, *beside, *whole.values()]
        results = walk.evaluate(closed, args)
        chosen = results if keep is None else [results[i] for i in keep]
        return [walk.dense(x) for x in chosen], walk.entries

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr; arguments and results may be expressions.

        In a plan, all arrays that it computes are `None`.
        """
        jaxpr: Jaxpr = closed.jaxpr
        consts = map(self.program.constant, closed.consts)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        # A value is dropped after its last use, which matters outside of jit.
        last: dict[Any, JaxprEqn | None] = {
            x: eqn for eqn in jaxpr.eqns for x in _variables(*eqn.invars, *eqn.outvars)
        }
        last |= dict.fromkeys(_variables(*jaxpr.outvars))
        for eqn in jaxpr.eqns:
            values = [value_of(atom) for atom in eqn.invars]
            results = self._evaluate_eqn(eqn, values)
            for i, place in enumerate(forwarded(eqn)):
                if place is not None:
                    results[i] = values[place]
            env.update(zip(eqn.outvars, results, strict=True))
            for x in _variables(*eqn.invars, *eqn.outvars):
                if last[x] is eqn:
                    env.pop(x, None)
        return [value_of(atom) for atom in jaxpr.outvars]

    def _evaluate_eqn(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        # JAX evaluates an equation without tables, a rule one with tables; where there
        # is no rule, or it declines, JAX gets the tables as arrays.
        rule = self.program.rules.get(name_and_params(eqn)[0])
        if not any(isinstance(x, Expression) for x in args):
            if not self.is_plan and makes_ref(eqn):
                return self._make_ref(eqn, rule, args)
            return self.evaluate_by_jax(eqn, args)
        # Where the loss does not depend on a use, the table is one without derivative:
        # its lookups need no deltas, and another use does not make its gradient dense.
        flags = self.program.slice.operands(eqn)
        args = [
            x if flag or not isinstance(x, Expression) else x.without_derivative()
            for x, flag in zip(args, flags, strict=True)
        ]
        if rule is not None:
            # A rule runs on the mesh of its equation, and ids leave it.
            before = len(self.entries)
            self.program.calls.append(eqn)
            with eqn.ctx.manager:
                results = rule(self, eqn, *args)
            self.program.calls.pop()
            new = self.entries[before:]
            self.entries[before:] = jax.tree.map(on_mesh_of_context, new)
            if results is not NotImplemented:
                return list(results)
        return self.evaluate_by_jax(eqn, [self.as_array(eqn, x) for x in args])

    def _make_ref(self, eqn: JaxprEqn, rule: Rule | None, args: list[Any]) -> list[Any]:
        """A mutable array of a step of a loop begins with a derivative: see `refs`."""
        name, params = name_and_params(eqn)
        if name in CALLS:
            return self.evaluate(as_closed(params[CALLS[name]]), args)
        if name in ("scan", "cond"):
            assert rule is not None
            return list(rule(self, eqn, *args))
        if self._step is None:
            return self.evaluate_by_jax(eqn, args)
        return [begun_with(self._step, eqn, args)]

    def evaluate_by_jax(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """Lets JAX evaluate an equation of arrays."""
        if self.is_plan:
            return [None] * len(eqn.outvars)
        return evaluate_eqn(eqn, args)

    def dense(self, value: Any) -> Any:
        """The array of any value, without a derivative with respect to leaves."""
        if not isinstance(value, Expression):
            return value
        if self.is_plan:
            return None
        return value.select(lambda x: x, memo=self._memo)

    def result(self, value: Any, is_stored: bool) -> Any:
        """The array of a result of the user's function.

        Args:
          value: What is to be returned.
          is_stored: Whether it is written back to where it is stored: a table is what
            it was before, and not brought up to date.
        """
        is_table = isinstance(value, Expression) and value.is_table
        return value.source.array if is_table and is_stored else self.dense(value)

    def as_array(self, eqn: JaxprEqn, value: Any) -> Any:
        """The array of any value, every row of which the gradient may depend on."""
        leaves = value.leaves if isinstance(value, Expression) else ()
        # Else the derivative would be lost in silence, as the result has no delta. In a
        # walk there are no such uses: the plan before found them, and made these leaves
        # arguments of what JAX differentiates.
        assert self.is_plan or not leaves
        if leaves:
            # What functions of JAX hold inside has no line: then that of the call.
            calls = (eqn, *reversed(self.program.calls))
            lines = (source_info_util.summarize(x.source_info) for x in calls)
            use = name_and_params(eqn)[0], next(filter(None, lines), "")
            for leaf in leaves:
                self.program.dense_uses.setdefault(leaf.index, use)
        return self.dense(value)

    def results_as_arrays(
        self, eqn: JaxprEqn, results: Sequence[Any], carry: Sequence[Any] = ()
    ) -> None:
        """Notes in a plan that expressions leave an equation as arrays.

        `carry` is the variables of a loop in which a later step gets the results.
        """
        if not self.is_plan:
            return
        for i in computed(eqn):
            if self.program.slice.variables & {eqn.outvars[i], *carry[i : i + 1]}:
                self.as_array(eqn, results[i])

    def request(self, requests: Sequence[Request]) -> list[Any]:
        """A delta for each request; `None` in a plan."""
        if self._deltas is None:
            self.requests += requests
            return [None] * len(requests)
        return [next(self._deltas) for _ in requests]

    def request_for(
        self, lookup: Lookup, value: Expression, axes: tuple[str, ...]
    ) -> dict[Leaf, jax.Array] | None:
        """Requests the deltas of a lookup; returns what to inject for each leaf.

        The rows vary over the mesh axes `axes`.
        """
        requests = [
            Request(
                leaf=leaf,
                shape=value.shape,
                count=lookup.count,
                depth=self.depth_of(leaf, lookup.depth),
                axes=axes,
                is_whole=leaf.index in self.program.whole_leaves,
                constant=lookup.constant,
                promises=lookup.promises,
            )
            for leaf in value.leaves
        ]
        deltas = self.request(requests)
        if self.is_plan or not requests:
            return None
        self.entries += [LookupEntries(lookup.rows(x.depth)) for x in requests]
        return {
            # The transpose of this gather scatters into the one delta of the leaf.
            x.leaf: lookup.read_whole(on_mesh_of_context(self.whole_deltas[x.leaf]))
            if x.is_whole
            else lookup.windows(on_mesh_of_context(delta), x.depth)
            for x, delta in zip(requests, deltas, strict=True)
        }

    def depth_of(self, leaf: Leaf, depth: int) -> int:
        """How many axes of a leaf are indexed, where a lookup indexes `depth`."""
        # A table that is looked up as t[ids] and as t[ids, cols] has entries of one
        # index each: all entries of a gradient have equally many.
        depths = self.program.depths
        if self.is_plan:
            depths[leaf.index] = min(depth, depths.get(leaf.index, depth))
        return depths[leaf.index]


_LARGE = 1 << 20  # bytes of a table whose copy would be noticed


def _constant(array: Any) -> Any:
    """An array that the program holds; a table without derivative, if a large one.

    Problem: two losses that look up the same rows, of which the other one trains the
    table, copy it. Cause: the loss that trains it reads it by the kernel, the other one
    by XLA's gather, of which XLA does not know that it comes before the update; equal
    reads it makes one, and what follows from that is in order. Remedy: both read by the
    kernel. Safe, as the rows have the same bits. Test: `test_two_losses` in
    `tests/gradients/test_cost_of_steps.py`.
    """
    if not isinstance(array, jax.Array | np.ndarray):  # a `jax.Ref`
        return array
    if array.ndim < 2 or not isinstance(array.size, int):  # symbolic: `jax.export`
        return array
    if array.size * array.dtype.itemsize < _LARGE:
        return array
    source, ids = Source(array), np.zeros(1, np.int32)  # type: ignore[arg-type]
    is_read_alike = reads_by_kernel(source, ids, Bounds())  # type: ignore[arg-type]
    return table(source) if is_read_alike else array


def _variables(*atoms: Any) -> list[Any]:
    return [x for x in atoms if isinstance(x, Var)]


def on_mesh_of_context(x: jax.Array) -> jax.Array:
    """A small array, replicated on the mesh of the program around.

    Over Explicit mesh axes JAX has no rule for gathers. They are traced with Auto axes,
    and arrays from outside are none of theirs.
    """
    mesh, layout = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding
    is_sharded = layout.spec != PartitionSpec(*[None] * jnp.ndim(x))
    if layout.mesh.empty or mesh.empty or (layout.mesh == mesh and not is_sharded):
        return x
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec()))
