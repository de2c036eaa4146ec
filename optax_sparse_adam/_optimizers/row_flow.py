"""Follows what has all rows of a table, and indices of rows, through an update.

In the program of `chain(average, sparse_adam)`, of a table of 1009 rows,

    b:f32[1009,4] = mul 0.9 a           a is all rows of the average: refused
    c:f32[1009,4] = scatter m ids rows  of this package: c is m, with rows of the batch
    d:f32[1009,4] = select_n even c m   c or m, so m, with rows of the batch or without

What is not of this package may hand rows and indices on, and choose between an array as
it was and as it is. Whatever else it does with them is refused, and so is an array of
as many rows as the table that it makes: a list of what is allowed has no holes where a
list of what is not has some. What wants rows finds them inside of `lazy`.
"""

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._jax_extras.jaxprs import name_and_params, scan_sizes
from .._rows.stale import STORED

# Of zeros these are zeros.
_SCALED = frozenset(["mul", "div", "neg", "convert_element_type"])
_MOVED = frozenset(["copy", "optimization_barrier", "sharding_constraint"])
_OTHER = (
    "its rows get updates of other indices than its gradient has (what makes zeros of "
    "gradients belongs around an optimiser, not in front of it)"
)
# What is called where it stands, with its operands in their order.
_CALLS = {
    **dict.fromkeys(["jit", "remat2"], "jaxpr"),
    **dict.fromkeys(["closed_call", "eval_jaxpr", "custom_jvp_call"], "call_jaxpr"),
    **{"custom_vjp_call": "call_jaxpr", "custom_vmap_call": "call", "cond": "branches"},
}


class AllRows(NamedTuple):
    """All rows of a table: those without a gradient are as they were in an array.

    Attributes:
      table: Its place among the parameters.
      leaf: Which array.
    """

    table: int
    leaf: int


class Ids(NamedTuple):
    """The indices of a gradient, or of an update.

    Attributes:
      table: Whose, by its place among the parameters.
      or_zeros: Whether an update of zeros may have zeros in their place.
    """

    table: int
    or_zeros: bool = False


class Choice(NamedTuple):
    """One number for all rows of a table, as `jnp.where` makes of its condition.

    Attributes:
      table: Its place among the parameters.
    """

    table: int


class Zeros(NamedTuple):
    """An array of zeros, as `optax.set_to_zero` makes.

    Attributes:
      always: Whether it is; or else it may be another one.
    """

    always: bool = True


Value = AllRows | Ids | Choice | Zeros | None
FOLLOWED = AllRows | Ids | Choice


class Needed(Exception):
    """More of a table than the rows of a batch, and why; or numbers of rows."""

    def __init__(self, table: int, why: str, *, numbers: bool = False):
        super().__init__(table, why)
        self.table, self.why, self.numbers = table, why, numbers


class RowFlow:
    """Follows what has all rows through a jaxpr.

    Args:
      sizes: How many rows each table has in it, another number than any other axis.
    """

    def __init__(self, sizes: dict[int, int]):
        self._tables = {size: i for i, size in sizes.items()}

    def run(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Value],
        around: str = "",
        is_ours: bool = False,
    ) -> list[Value]:
        """What its results are, of arguments that are this.

        Args:
          jaxpr: A program.
          inputs: What its arguments are.
          around: The line that calls it.
          is_ours: Whether it is of this package.

        Raises:
          Needed: If it takes all rows, or ids, otherwise than the module says.
        """
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Value:
            return None if isinstance(atom, Literal) else values.get(atom)

        for eqn in jaxpr.eqns:
            operands = [*map(of, eqn.invars)]
            line = source_info_util.summarize(eqn.source_info) or around
            results = self._results(eqn, operands, line, is_ours or _is_ours(eqn))
            values.update(zip(eqn.outvars, results, strict=True))
        return [*map(of, jaxpr.outvars)]

    def _results(
        self, eqn: JaxprEqn, operands: list[Value], line: str, is_ours: bool
    ) -> Sequence[Value]:
        name, params = name_and_params(eqn)
        is_chosen = name == "cond" and isinstance(operands[0], FOLLOWED)
        if name in _CALLS and not is_chosen:
            bodies = params.get("branches") or [params[_CALLS[name]]]
            of_body = operands[1:] if name == "cond" else operands
            made = [
                self.run(getattr(x, "jaxpr", x), of_body, line, is_ours) for x in bodies
            ]
            return [_merged(x, line) for x in zip(*made, strict=True)]
        # Of this package another type is refused by its name.
        if name in _MOVED or (is_ours and name == "convert_element_type"):
            return operands
        followed = [x for x in operands if isinstance(x, FOLLOWED)]
        if is_ours and name in ("while", "scan"):
            return self._of_loop(eqn, operands, line)
        if is_ours:
            return self._of_ours(name, eqn, operands, followed, line)
        if name == "select_n" and isinstance(operands[0], Choice | None):
            cases = {*operands[1:]}
            if len(cases) == 1 and isinstance(operands[1], AllRows):
                return operands[1:2]
        if followed:
            raise _refusal(name, followed[0], line)
        zeros = [x for x in operands if isinstance(x, Zeros)]
        if zeros and name in _SCALED and isinstance(operands[0], Zeros | None):
            return zeros[:1]
        made_of = [self._table_of(var) for var in eqn.outvars]
        if name == "broadcast_in_dim" and not _shape_of(eqn.invars[0]):
            if made_of[0] is not None:
                return [Choice(made_of[0])]
            return [Zeros() if _is_zero(eqn.invars[0]) else None]
        for i in made_of:
            if i is not None:
                raise Needed(i, f"`{name}` at {line} makes an array of as many")
        return [None] * len(eqn.outvars)

    def _of_ours(
        self,
        name: str,
        eqn: JaxprEqn,
        operands: list[Value],
        followed: list[AllRows | Ids | Choice],
        line: str,
    ) -> list[Value]:
        """Results of this package: what is written into an array is that array."""
        rows = [x for x in followed if isinstance(x, AllRows)]
        ids = {x for x in followed if isinstance(x, Ids)}
        for x in rows:
            if Ids(x.table) not in ids:
                raise Needed(x.table, _OTHER)
        results: list[Value] = [
            next(iter(ids)) if len(ids) == 1 and _is_ids(var.aval) else None
            for var in eqn.outvars
        ]
        if name == "ffi_call":
            for i, k in eqn.params["input_output_aliases"]:
                results[k] = operands[i]
        elif name.startswith("scatter") and isinstance(operands[0], AllRows):
            results = operands[:1]
        elif rows and name != "gather":
            raise _refusal(name, rows[0], line)
        return results

    def _of_loop(self, eqn: JaxprEqn, operands: list[Value], line: str) -> list[Value]:
        """Results of a loop of this package, over blocks of entries."""
        name, params = name_and_params(eqn)
        if name == "while":
            body, first = params["body_jaxpr"], params["cond_nconsts"]
            consts = operands[first:][: params["body_nconsts"]]
            carry, xs = operands[first + len(consts) :], list[Value]()
        else:
            body, (first, carried) = params["jaxpr"], scan_sizes(eqn)
            last = first + carried
            consts, carry, xs = operands[:first], operands[first:last], operands[last:]
        while True:
            made = self.run(body.jaxpr, [*consts, *carry, *xs], line, True)
            # What may be ids in one round, is.
            new = [x or y for x, y in zip(carry, made, strict=False)]
            for x, y in zip(carry, made, strict=False):
                if x != y and isinstance(x or y, AllRows):
                    raise _refusal(name, x or y, line)
            if new == carry:
                return [*carry, *made[len(carry) :]]
            carry = new

    def _table_of(self, var: Any) -> int | None:
        """The table that has as many rows as an array along one of its axes."""
        rows = (self._tables[n] for n in _shape_of(var) if n in self._tables)
        return next(rows, None)


def have_same_numbers(*programs: tuple[ClosedJaxpr, Container[int]]) -> bool:
    """Whether two programs compute with the same ones, beside those of this package.

    Each with the numbers of rows that a choice between arrays of all rows may have.
    """
    pairs = itertools.zip_longest(*(_numbers_of(*x) for x in programs))
    return all(a is b or _bits(a) == _bits(b) for a, b in pairs)


def _bits(x: Any) -> Any:
    dtype: Any = getattr(x, "dtype", None)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(x) if is_key else x)
    return array.dtype, array.shape, array.tobytes()


def _numbers_of(closed: ClosedJaxpr, sizes: Container[int]) -> Iterator[Any]:
    def of_jaxpr(jaxpr: Any, known: dict[Any, Any], is_called: bool) -> Iterator[Any]:
        """`known` are those of its variables that are constants."""

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            if _is_ours(eqn):
                continue
            name, params = name_and_params(eqn)
            operands = [*map(value_of, eqn.invars)]
            of_body = operands[1:] if name == "cond" else operands
            if name not in _CALLS:
                yield from operands
            # Of one number with as many rows as a table: a condition, or refused.
            is_one = name == "broadcast_in_dim" and not _shape_of(eqn.invars[0])
            is_choice = is_called and is_one
            for param in jax.tree.leaves(params):
                inner = getattr(param, "jaxpr", param)
                if isinstance(inner, Jaxpr):
                    consts = getattr(param, "consts", ())
                    inside = dict(zip(inner.constvars, consts, strict=False))
                    if name in _CALLS:
                        inside |= zip(inner.invars, of_body, strict=False)
                    yield from of_jaxpr(inner, inside, is_called and name in _CALLS)
                elif isinstance(param, int | float):
                    yield None if is_choice and param in sizes else param
        yield from map(value_of, jaxpr.outvars)

    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    yield from of_jaxpr(closed.jaxpr, known, True)


def _is_ours(eqn: JaxprEqn) -> bool:
    return STORED in str(eqn.source_info.name_stack)


def _shape_of(atom: Any) -> tuple[int, ...]:
    """Of what is an array; `()` of a reference, say."""
    return getattr(atom.aval, "shape", ())


def _is_ids(aval: Any) -> bool:
    return bool(aval.shape) and jnp.issubdtype(aval.dtype, jnp.integer)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and not atom.val


def _merged(values: Sequence[Value], line: str) -> Value:
    """What one of these is, whichever; raises where it may be ids, or rows, or not."""
    kinds = {*values}
    if len(kinds) == 1:
        return kinds.pop()
    ids = {x._replace(or_zeros=False) for x in kinds if isinstance(x, Ids)}
    others = {x for x in kinds if not isinstance(x, Ids | Zeros)}
    if others <= {None} and not ids:
        return Zeros(always=False)
    if len(ids) == 1 and not others:
        return ids.pop()._replace(or_zeros=True)
    raise _refusal("cond", next(x for x in kinds if isinstance(x, FOLLOWED)), line)


def _refusal(name: str, value: Any, line: str) -> Needed:
    if isinstance(value, Ids):
        why = f"`{name}` at {line} computes with their numbers, which are others"
        return Needed(value.table, why, numbers=True)
    return Needed(value.table, f"`{name}` at {line} takes all, or its state's")
