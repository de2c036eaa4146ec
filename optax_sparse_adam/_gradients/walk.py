"""Differentiates a program with respect to the rows that it looks up.

A walk evaluates the jaxpr of the loss with an `Expression` in the place of each table.
At each lookup it injects a *delta*, zeros with respect to which JAX then differentiates
(`expressions.inject`), and keeps the row ids beside it:

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
gradient of that leaf is dense (`DenseUse` says why), and the leaf is an ordinary
argument of what JAX differentiates.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.jaxprs import evaluate_eqn
from .backward_slice import BackwardSlice
from .expressions import Expression, Leaf
from .lookups import Lookup, leading_columns

Results = Any  # what a rule returns: a list, or NotImplemented
Rule = Callable[..., Results]


class Bags(NamedTuple):
    """Of a delta with a row for each bag: what one call of the lookup reads."""

    entries: int
    bags: int
    dtype: Any
    has_weights: bool


class BagEntries(NamedTuple):
    """In the place of row ids: those of bags, of one or more calls of a lookup.

    Attributes:
      ids: `[entries, 1]`.
      segments: `[entries]`, the bag of each in its call.
      weights: `[entries]`, or `None`.
    """

    ids: jax.Array
    segments: jax.Array
    weights: jax.Array | None


class Request(NamedTuple):
    """A delta that a walk needs.

    Attributes:
      leaf: Of the table.
      shape: The table's.
      count: How many rows are looked up.
      depth: How many leading axes of the table are the index of a row.
      axes: Mesh axes over which the rows vary.
      is_whole: Whether the delta is of the table's shape. So it is in a loop that looks
        up more rows than the table has: JAX then adds the cotangents of all steps up,
        and memory is that of `jax.grad`.
      constant: The row, if it is the same in each call.
      bags: For sums of rows; `count` is then the number of bags.
    """

    leaf: Leaf
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment]  # tuple has a method count
    depth: int
    axes: tuple[str, ...] = ()
    is_whole: bool = False
    constant: int | None = None
    bags: Bags | None = None

    @property
    def num_entries(self) -> int:
        if self.bags is None or self.bags.bags == 0:
            return self.count
        return self.count // self.bags.bags * self.bags.entries

    @property
    def delta(self) -> jax.ShapeDtypeStruct:
        rows = (self.count, *self.shape[self.depth :])
        dtype = self.leaf.dtype if self.bags is None else self.bags.dtype
        return jax.ShapeDtypeStruct(self.shape if self.is_whole else rows, dtype)


class DenseUse(NamedTuple):
    """A use of a table other than lookups: the operation, and the user's line."""

    primitive: str
    line: str


@dataclasses.dataclass(frozen=True)
class Program:
    """What holds for all walks over one program.

    Attributes:
      rules: The rule of each primitive, by name.
      slices: Says which values the loss depends on.
      depths: For each leaf, how many leading axes are the index of a row; the smallest
        number that one of its lookups indexes. Known after a first plan.
      dense_uses: For each leaf its first use other than lookups, as plans find them.
      elementwise: What is known of calls by `id`: whether they are elementwise.
      plans: Of jaxprs, for each kind of arguments.
      calls: The equations that a walk is in, the innermost last.
    """

    rules: dict[str, Rule]
    slices: BackwardSlice = dataclasses.field(default_factory=BackwardSlice)
    depths: dict[int, int] = dataclasses.field(default_factory=dict)
    dense_uses: dict[int, DenseUse] = dataclasses.field(default_factory=dict)
    elementwise: dict[Any, Any] = dataclasses.field(default_factory=dict)
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict)
    calls: list[JaxprEqn] = dataclasses.field(default_factory=list)


class Walk:
    """One evaluation of a jaxpr, or the plan of one.

    Attributes:
      program: What holds for all walks.
      shapes: Shapes of the tables. Scalars that are broadcast to one of them wait for
        a lookup, as `where(table > 0, table, 0)[ids]` needs none of that size.
      whole: Leaves whose deltas are of the table's shape here.
      requests: The deltas that this walk needs, in order; in a plan.
      rows: The row ids of each delta, in the same order; `[count, depth]`, or
        `BagEntries`.
    """

    def __init__(
        self,
        program: Program,
        shapes: frozenset[tuple[int, ...]],
        deltas: Iterator[jax.Array] | None = None,
        whole: frozenset[int] = frozenset(),
    ):
        self.program = program
        self.shapes = shapes
        self.whole = whole
        self.requests: list[Request] = []
        self.rows: list[Any] = []
        self._deltas = deltas
        self._memo: dict[Any, jax.Array] = {}  # of this trace alone

    @property
    def is_plan(self) -> bool:
        return self._deltas is None

    def inside(
        self,
        deltas: Sequence[jax.Array],
        shapes: frozenset[tuple[int, ...]] | None = None,
        whole: frozenset[int] = frozenset(),
    ) -> "Walk":
        """A walk over a jaxpr that JAX traces by itself."""
        shapes = self.shapes if shapes is None else shapes
        return Walk(self.program, shapes, iter(deltas), self.whole | whole)

    def plan(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        needed: Sequence[bool],
        shapes: frozenset[tuple[int, ...]] | None = None,
        whole: frozenset[int] = frozenset(),
    ) -> tuple[list[Request], list[Any]]:
        """The deltas that a jaxpr needs, and its results: expressions, or `None`.

        Plans are kept, as one of a loop in a loop would else be made for each of both.
        """
        program, whole = self.program, self.whole | whole
        shapes = self.shapes if shapes is None else shapes
        kinds = tuple(x.kind if isinstance(x, Expression) else None for x in args)
        depths = tuple(sorted(program.depths.items()))
        key = (id(closed.jaxpr), tuple(needed), kinds, shapes, whole, depths)
        if key not in program.plans:
            walk = Walk(program, shapes, None, whole)
            unknown = [None if kind is None else Expression(*kind) for kind in kinds]
            places = [
                next((i for i, y in enumerate(unknown) if y is x), x)
                if isinstance(x, Expression)
                else None
                for x in walk.evaluate(closed, unknown, needed)
            ]
            # The jaxpr stays alive as long as its `id` is a key.
            program.plans[key] = walk.requests, places, closed.jaxpr
        requests, places, _ = program.plans[key]
        return requests, [args[x] if isinstance(x, int) else x for x in places]

    def evaluate(
        self, closed: ClosedJaxpr, args: Sequence[Any], needed: Sequence[bool]
    ) -> list[Any]:
        """Evaluates a jaxpr; arguments and results may be expressions.

        Args:
          closed: The jaxpr.
          args: Its arguments. In a plan, all arrays that it computes are `None`.
          needed: Says for each result whether the loss depends on it.
        """
        jaxpr: Jaxpr = closed.jaxpr
        variables = self.program.slices.of(jaxpr, needed).variables
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        # What no later equation reads is dropped, as it matters outside of jit.
        live = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        dead: list[set[Var]] = []
        for eqn in reversed(jaxpr.eqns):
            atoms = (*eqn.invars, *eqn.outvars)
            dead.append({atom for atom in atoms if isinstance(atom, Var)} - live)
            live |= dead[-1]

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            flags = [var in variables for var in eqn.outvars]
            results = self._evaluate_eqn(eqn, operands, flags)
            env.update(zip(eqn.outvars, results, strict=True))
            for var in dead.pop():
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluate_eqn(
        self, eqn: JaxprEqn, args: list[Any], needed: list[bool]
    ) -> list[Any]:
        rule = self.program.rules.get(eqn.primitive.name)
        is_broadcast = eqn.primitive.name == "broadcast_in_dim"
        if not (is_broadcast or any(isinstance(x, Expression) for x in args)):
            return self.as_it_is(eqn, args)
        if rule is not None:
            before = len(self.rows)
            self.program.calls.append(eqn)
            with eqn.ctx.manager:
                results = rule(self, eqn, needed, *args)
            self.program.calls.pop()
            self.rows[before:] = jax.tree.map(on_mesh_of_context, self.rows[before:])
            if results is not NotImplemented:
                return list(results)
        flags = self.program.slices.operands(eqn, needed)
        for arg, flag in zip(args, flags, strict=True):
            if flag:
                self.use_densely(eqn, arg)
        return self.as_it_is(eqn, [self.dense(x) for x in args])

    def as_it_is(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
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
        return value.select(lambda x: x, value.shape, memo=self._memo)

    def use_densely(self, eqn: JaxprEqn, value: Any) -> None:
        """Notes that the gradient depends on every row of a value."""
        leaves = value.leaves if isinstance(value, Expression) else ()
        # Else the derivative would be lost: walks follow plans without such uses.
        assert self.is_plan or not leaves
        # What functions of JAX hold inside has no line: then that of the call.
        calls = (eqn, *reversed(self.program.calls))
        lines = (source_info_util.summarize(x.source_info) for x in calls)
        line = next(filter(None, lines), "") if leaves else ""
        for leaf in leaves:
            use = DenseUse(eqn.primitive.name, line)
            self.program.dense_uses.setdefault(leaf.index, use)

    def request(self, requests: Sequence[Request]) -> list[Any]:
        """A delta for each request; `None` in a plan."""
        if self._deltas is None:
            self.requests += requests
            return [None] * len(requests)
        return [next(self._deltas) for _ in requests]

    def look_up(
        self,
        lookup: Lookup,
        value: Expression,
        axes: tuple[str, ...],
        indices: Callable[[], jax.Array],
    ) -> dict[Leaf, jax.Array] | None:
        """What a lookup injects into the rows of each leaf; `None` in a plan.

        Args:
          lookup: What it reads.
          value: Of what.
          axes: Mesh axes over which the result varies.
          indices: Computes `[count, len(lookup.axes)]`.
        """
        depths = self.program.depths
        requests = []
        for leaf in value.leaves:
            if self.is_plan:
                depths[leaf.index] = min(
                    lookup.depth, depths.get(leaf.index, lookup.depth)
                )
            is_whole = leaf.index in self.whole
            count, depth = lookup.count, depths[leaf.index]
            requests.append(
                Request(
                    leaf, value.shape, count, depth, axes, is_whole, lookup.constant
                )
            )
        deltas = self.request(requests)
        if self.is_plan:
            return None
        found = {}
        for request, delta in zip(requests, deltas, strict=True):
            delta, depth = on_mesh_of_context(delta), request.depth
            rows = lookup.rows(indices(), depth)
            self.rows.append(rows)
            if request.is_whole:
                delta = delta.at[tuple(rows.T)].get(mode="fill", fill_value=0)
            found[request.leaf] = lookup.windows(delta, indices(), depth)
        return found


def on_mesh_of_context(x: jax.Array) -> jax.Array:
    """A small array, replicated on the mesh of the program around.

    Over Explicit mesh axes JAX has no rule for gathers. They are traced with Auto axes,
    and arrays from outside are none of theirs.
    """
    mesh, own = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding
    is_sharded = any(entry is not None for entry in own.spec)
    if own.mesh.empty or mesh.empty or (own.mesh == mesh and not is_sharded):
        return x
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec()))


def evaluate_with_tables(
    program: Program, closed: ClosedJaxpr, values: Sequence[Any]
) -> list[Any]:
    """The results of a program whose arguments may be tables, without derivatives.

    Rows of a `StaleTable` are brought up to date where they are looked up, and the
    kernel looks up what it may, as in the program that is differentiated.
    """
    shapes = frozenset(x.shape for x in values if isinstance(x, Expression))
    walk = Walk(program, shapes, iter(()))
    results = walk.evaluate(closed, values, [False] * len(closed.jaxpr.outvars))
    return [jnp.asarray(walk.dense(x)) for x in results]


def joined_rows(
    rows: Sequence[jax.Array], depth: int, shape: tuple[int, ...]
) -> jax.Array:
    """Row ids `[n, >= depth]` one after the other, as ids `[n, depth]`."""
    return jnp.concatenate([leading_columns(x, depth, shape) for x in rows])
