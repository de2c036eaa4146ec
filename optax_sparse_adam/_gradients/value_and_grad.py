"""`value_and_grad` and `grad` with row-sparse gradients for tables."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import varying_axes
from .._rows.resting_state import exact_states, held_by, is_exact, table_states
from .analysis import UNKNOWN, Analysis
from .arguments import check_argnums, check_leaves, leaf_name, refuse_new_state
from .interpreter import Context
from .rules import RULES
from .rules_lookups import is_every_row
from .symbolic_values import (
    Deferred,
    Known,
    Part,
    RowSum,
    dense,
    is_symbolic,
    outdated,
    table,
    to_bcoo,
)

KeyPath = tuple[Any, ...]
Sparse = Any  # bool | tree of bool | Callable[[KeyPath, Any], bool]
_ARRAY = object()


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    sparse: Sparse = True,
    read: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, with row-sparse gradients for embedding tables.

    The model is not changed. A leaf whose gradient is made of row lookups only
    (`table[ids]`, `jnp.take`, `flax.linen.Embed`, `flax.nnx.Embed`,
    `equinox.nn.Embedding`, `haiku.Embed`, ...) comes back as a
    `jax.experimental.sparse.BCOO` of the table's shape, with the meaning of `jax.grad`
    to the letter: what a lookup clamps or drops out of bounds is clamped or dropped.
    Every other leaf comes back as `jax.value_and_grad` gives it, but for leaves that
    the loss does not use, or looks up no rows of, as with an empty batch: unless they
    are scalars, they are row-sparse with nothing stored (`nse == 0`), as `None` is in
    torch. The optimisers of this package leave them as they are, at no cost; a dense
    optimiser of optax wants zeros in their place: name the tables by `sparse`. Nothing
    of the size of a row-sparse leaf is computed or stored. There is no `holomorphic`,
    no `allow_int` and no `reduce_axes`.

    The BCOO holds one entry for each row that was looked up, duplicates included, at
    most as many as the table has rows: where a batch looks up more, the gradient comes
    back added up, with `nse` the number of rows and the rows that were not touched as
    padding. `coalesce` adds duplicates up at any time.

    Lookups may stand inside `jit`, `jax.checkpoint`, `lax.scan`, `lax.cond`, `vmap` and
    functions with custom derivatives, and a table may be cast, scaled or passed through
    any elementwise function before it is looked up. `table[0]`, with a constant, is a
    lookup of one row; only where constants read every row, as a Python loop over
    stacked layers does, the gradient is dense. A `vmap` over stacked tables and their
    ids is a lookup, too, with `n_sparse == 2`. Any other use of a table, such as tied
    output weights, weight decay in the loss, a range with fixed bounds (`table[:k]`),
    or `take_along_axis`, makes its gradient dense. Two things cost what they cost under
    `jax.grad`: a nonlinear function of a table inside a branch of `lax.cond`, and a
    `vmap` over the predicate of a `lax.cond` that looks a table up.

    In one jitted step with the update, whatever the call returns, and whatever a
    `jax.debug.print` in `fun` shows, is read before the table is updated in place. Old
    rows that the step reads elsewhere make XLA copy the table: see `apply_updates`.
    Under `checkify.index_checks`, lookups out of bounds are found as under `jax.grad`,
    by the kernel, too.

    `fun` is traced, like under `jax.jit`: Python control flow cannot depend on values
    that are computed in it. Call it inside of `jax.jit`; outside, each call traces
    `fun` anew.

    Args:
      fun: Function that returns a scalar, or a pair `(scalar, aux)` if `has_aux`.
      argnums: Which positional argument or arguments to differentiate.
      has_aux: Whether `fun` returns a pair.
      sparse: `True` gives row-sparse leaves wherever possible, `False` nowhere. A tree
        of booleans like the differentiated argument (a tuple of trees if `argnums` is a
        sequence), or a prefix of it, or a predicate `sparse(path, leaf)` that returns a
        boolean gives them exactly where it says so, or raises. A leaf that it says
        `False` of and that the loss does not use gets dense zeros.
      read: The state of `exact_adam` or `exact_adamw`, or of any optimiser that holds
        it, for the differentiated argument. A lookup then gives each row as dense Adam
        would have it now, and the gradient is taken there; nothing is written. A use
        other than lookups sees the whole table brought up to date, at the table's
        price.

    Returns:
      A function like `fun` that returns `(value, grads)`, or `((value, aux), grads)`.

    Raises:
      TypeError: By the returned function; in `jax.value_and_grad`'s words for a loss
        that is not a real scalar; for a leaf that is not real or complex; and for an
        NNX module with more than `nnx.Param`s, which `flax_nnx.value_and_grad` takes.
      ValueError: By the returned function, if `sparse` does not fit the argument, or
        names a leaf whose gradient cannot be row-sparse; it tells the operation in the
        way. If `read` holds no state of `exact_adam`, or that of other parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> def loss(params, ids):
      ...     return jnp.sum(params["table"][ids] @ params["w"])
      >>> params = {"table": jnp.ones((1000, 4)), "w": jnp.ones((4, 2))}
      >>> value, grads = osa.value_and_grad(loss)(params, jnp.array([3, 7, 3]))
      >>> grads["table"]
      BCOO(float32[1000, 4], nse=3, n_dense=1)
      >>> grads["w"].shape
      (4, 2)
    """
    check_argnums(argnums)
    kept = refuse_new_state(fun) if callable(fun) else fun
    reference = jax.value_and_grad(kept, argnums, has_aux)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = as_numbers(argnums)
        if not all(-len(args) <= number < len(args) for number in numbers):
            return reference(*args, **kwargs)  # raises, in JAX's words
        chosen = [args[number] for number in numbers]
        tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        check_leaves(tree)
        if sparse is False and read is None:
            return reference(*args, **kwargs)
        wanted = _wanted(sparse, tree)
        structure: Any = None
        outputs: list[Any] = []

        def traced(*chosen: Any) -> tuple[Any, Any]:
            values = list(args)
            for number, value in zip(numbers, chosen, strict=True):
                values[number] = value
            result, grads = reference(*values, **kwargs)
            # An auxiliary output may be anything; arrays leave through the jaxpr.
            nonlocal structure
            leaves, structure = jax.tree.flatten(result)
            outputs[:] = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
            return [x for x in leaves if isinstance(x, jax.Array)], grads

        closed = jax.make_jaxpr(traced)(*chosen)
        arrays, grads = _evaluate(closed, tree, wanted, current_tables(tree, read))
        rest = iter(arrays)
        results = [next(rest) if x is _ARRAY else x for x in outputs]
        result = jax.tree.unflatten(structure, results)
        return result, jax.tree.unflatten(jax.tree.structure(tree), grads)

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    sparse: Sparse = True,
    read: Any = None,
) -> Callable[..., Any]:
    """Like `jax.grad`, with row-sparse gradients for embedding tables.

    `value_and_grad` without the value; see there.

    Args:
      fun: Function that returns a scalar, or a pair `(scalar, aux)` if `has_aux`.
      argnums: Which positional argument or arguments to differentiate.
      has_aux: Whether `fun` returns a pair.
      sparse: Which leaves are to be row-sparse.
      read: State of `exact_adam`, whose rows are read up to date.

    Returns:
      A function like `fun` that returns the gradients, or `(gradients, aux)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 7, 3])
      >>> osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      BCOO(float32[1000, 4], nse=3, n_dense=1)
    """
    both = value_and_grad(fun, argnums, has_aux, sparse=sparse, read=read)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return grad_fun


def as_numbers(argnums: Any) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    return tuple(map(operator.index, numbers))


def _wanted(sparse: Sparse, tree: Any) -> list[bool | None]:
    """For each leaf: row-sparse (`True`), dense (`False`), or as it comes (`None`)."""
    paths, leaves = _with_paths(tree)
    if sparse is True:
        return [None] * len(leaves)
    if callable(sparse):
        marks = [sparse(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        what = "The predicate `sparse` must return"
    else:
        try:
            marks = jax.tree.leaves(jax.tree.broadcast(sparse, tree))
        except ValueError as error:
            raise ValueError(
                "`sparse` must be a tree of booleans like the differentiated argument, "
                f"or a prefix of it: {error}"
            ) from None
        what = "The leaves of `sparse` must be"
    for path, mark in zip(paths, marks, strict=True):
        if not isinstance(mark, bool | np.bool_):
            raise ValueError(
                f"{what} booleans, got {mark!r} of type {type(mark).__name__} at "
                f"{leaf_name(path)}."
            )
    return [bool(mark) for mark in marks]


def current_tables(tree: Any, read: Any) -> list[Deferred]:
    """The values of the leaves, which the state `read` may have to bring up to date."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
    values = [table(x) for x in leaves]
    for node in [] if read is None else exact_states(read, "`read`")[0]:
        if is_exact(node):
            tables, shapes = table_states(node), list(map(jnp.shape, leaves))
            for i, (place, rows) in held_by(node, shapes, treedef).items():
                array = jnp.asarray(leaves[i])
                values[i] = outdated(array, rows, tables.at(place), node.constants)
    return values


def _evaluate(
    closed: ClosedJaxpr, tree: Any, wanted: list[bool | None], values: list[Deferred]
) -> tuple[list[Any], list[Any]]:
    """Evaluates the jaxpr of `(results, gradients)`, row-sparse where wanted."""
    paths, leaves = _with_paths(tree)
    analysis = Analysis(RULES)
    able = _able(analysis, closed, paths, leaves, wanted)
    shapes = frozenset(jnp.shape(x) for x, can in zip(leaves, able, strict=True) if can)
    context = Context(analysis, RULES, shapes, [], Known())
    args = [x if can else x.dense for x, can in zip(values, able, strict=True)]
    shown: list[Any] = []
    if any(able):
        atoms = _shown(closed.jaxpr)
        jaxpr = closed.jaxpr.replace(outvars=[*atoms, *closed.jaxpr.outvars])
        wanted_outputs = [False] * len(atoms) + _of_gradients(closed, able)
        program = ClosedJaxpr(jaxpr, closed.consts)
        outputs = context.evaluate(program, args, wanted_outputs)
        shown = [x for x in outputs[: len(atoms)] if not is_symbolic(x)]
        outputs = outputs[len(atoms) :]
    else:
        outputs = list(jaxpr_as_fun(closed)(*args))
    number = len(outputs) - len(leaves)
    results = [jnp.asarray(dense(x)) for x in outputs[:number]]
    grads: list[Any] = []
    marks = zip(paths, wanted, able, values, outputs[number:], strict=True)
    for path, mark, can, value, total in marks:
        if can and isinstance(total, RowSum):
            after = _after(total, [*results, *shown])
            grads.append(to_bcoo(after, is_stale=value.is_table))
        elif mark:
            raise ValueError(_refusal(path, next(iter(context.blamed), None)))
        else:
            grads.append(jnp.asarray(dense(total)))
    return results, grads


def _shown(jaxpr: Jaxpr) -> list[Any]:
    """What `jax.debug.print` and other effects of the loss read."""
    return [
        atom
        for eqn in jaxpr.eqns
        for atom in (eqn.invars if eqn.effects else ())
        if not isinstance(atom, Literal)
    ]


def _with_paths(tree: Any) -> tuple[list[KeyPath], list[Any]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [path for path, _ in pairs], [leaf for _, leaf in pairs]


def _of_gradients(closed: ClosedJaxpr, flags: Sequence[bool]) -> list[bool]:
    """Flags for all outputs of the jaxpr, given those of the gradients, the last."""
    return [*[False] * (len(closed.jaxpr.outvars) - len(flags)), *flags]


def _able(
    analysis: Analysis,
    closed: ClosedJaxpr,
    paths: list[KeyPath],
    leaves: list[Any],
    wanted: list[bool | None],
) -> list[bool]:
    """Which leaves get a row-sparse gradient; raises where one is named in vain."""
    able = [
        mark is not False
        and jnp.ndim(leaf) > 0
        and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))
        for mark, leaf in zip(wanted, leaves, strict=True)
    ]
    outputs = analysis.obstacles(
        closed.jaxpr, _of_gradients(closed, able), [UNKNOWN] * len(leaves)
    )
    obstacles = outputs[len(outputs) - len(leaves) :]
    for i, obstacle in enumerate(obstacles):
        obstacle = obstacle if able[i] else UNKNOWN
        if wanted[i] and obstacle is not None:
            raise ValueError(_refusal(paths[i], obstacle.eqn, obstacle.line))
        able[i] = able[i] and obstacle is None
        if able[i] and not wanted[i]:
            atom = closed.jaxpr.outvars[len(outputs) - len(leaves) + i]
            able[i] = not is_every_row(closed.jaxpr, atom)
    return able


def _after(total: RowSum, results: list[jax.Array]) -> RowSum:
    """Makes a gradient depend on all that the call shows, without changing it.

    XLA updates a table in place only where it knows that every read of the old rows
    comes before; else it copies the table to be safe. Reads that the gradient does not
    depend on are those of a loss that is linear in a table, and of auxiliary outputs
    (https://openxla.org/xla/aliasing; an `optimization_barrier` would say so, but XLA
    drops it on CPUs before it looks). So one number of each result is compared with
    infinity: no number is above. Inside shard_map, a value that varies over more axes
    than the gradient would make it vary there as well, and is left out.
    (tests/gradients/test_cost_of_steps.py)
    """

    def after(part: Part) -> Part:
        axes = total.axes.union(varying_axes(part.data))
        values = [
            x for x in results if _is_numeric(x) and axes.issuperset(varying_axes(x))
        ]
        if not values:
            return part
        place = jnp.int32(0)
        if values[0].ndim == 0:  # the loss, unless it is left out
            place = (_as_float(values[0]) > jnp.inf).astype(jnp.int32)
        numbers = jnp.stack([_some_number(x, place) for x in values])
        is_never = jnp.any(numbers > jnp.inf)
        return part._replace(indices=jnp.where(is_never, -1, part.indices))

    return dataclasses.replace(total, parts=tuple(map(after, total.parts)))


def _is_numeric(x: jax.Array) -> bool:
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _as_float(x: jax.Array) -> jax.Array:
    return jnp.real(x).astype(jnp.float32)


def _some_number(x: jax.Array, place: jax.Array) -> jax.Array:
    """A float32 scalar for which all of `x` is computed.

    An element at a place that XLA does not know: with a known one it would look into a
    concatenation or a pad, and compute no more than this element. On a mesh, where a
    slice would gather all of `x`, the largest.
    """
    if x.ndim and mesh_of(x).empty:
        x = lax.dynamic_slice(x, (place,) * x.ndim, (1,) * x.ndim)
    return _as_float(jnp.max(x))


def _refusal(path: KeyPath, eqn: JaxprEqn | None = None, line: str = "") -> str:
    cause = "it has a use other than row lookups"
    if eqn is not None:
        line = line or source_info_util.summarize(eqn.source_info)
        cause = f"of `{eqn.primitive.name}` at {line}"
    return (
        f"`sparse` asks for a row-sparse gradient of {leaf_name(path)}, which cannot "
        f"be had because {cause}: it must be made of row lookups only. Let this leaf "
        "have a dense gradient; or stop the gradient of that use with "
        "jax.lax.stop_gradient; or, if that is weight decay, leave it to the optimiser."
    )
