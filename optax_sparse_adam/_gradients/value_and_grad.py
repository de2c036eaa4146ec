"""`value_and_grad` and `grad` with row-sparse gradients for tables."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, valid_jaxtype

from .._exact_adam.rows import whole_values
from .._exact_adam.state import (
    RowState,
    exact_states,
    is_exact,
    rows_by_parameter,
    table_states,
)
from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import vary, varying_axes
from .arguments import check_argnums, check_leaves, leaf_name, refuse_new_state
from .expressions import Expression, StaleTable, Table, table
from .row_slices import RowSlices, every_row, to_bcoo
from .rules import RULES
from .walk import DenseUse, Program, Request, Walk

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
    `shard_map`, and a table may be cast, scaled or passed through any elementwise
    function before it is looked up. `table[0]`, with a constant, is a
    lookup of one row; only where constants read every row, as a Python loop over
    stacked layers does, the gradient is dense. A `vmap` over stacked tables and their
    ids is a lookup, too, with `n_sparse == 2`. Any other use of a table, such as tied
    output weights, weight decay in the loss, a range with fixed bounds (`table[:k]`),
    `take_along_axis`, or a function with a `jax.custom_vjp` that takes it, makes its
    gradient dense; rows that are looked up before may go into any function. A `vmap`
    over the predicate of a `lax.cond` that looks a table up costs what it costs under
    `jax.grad`.

    In one jitted step with the update, whatever the call returns, and whatever a
    `jax.debug.print` in `fun` shows, is read before the table is updated in place. Old
    rows that the step reads elsewhere make XLA copy the table: see `apply_updates`.
    Under `checkify.index_checks`, lookups out of bounds are found as under `jax.grad`,
    by the kernel, too.

    `fun` is traced, like under `jax.jit`: Python control flow cannot depend on values
    that are computed in it. Call it inside of `jax.jit`; outside, each call traces
    `fun` again.

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
        inside = [-len(args) <= number < len(args) for number in numbers]
        places = {number % max(1, len(args)) for number in numbers}
        if not numbers or not all(inside) or len(places) < len(numbers):
            return reference(*args, **kwargs)  # raises, in JAX's words
        chosen = [args[number] for number in numbers]
        tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        check_leaves(tree)
        if sparse is False and read is None:
            return reference(*args, **kwargs)
        wanted = _wanted(sparse, tree)
        structure: Any = None
        outputs: list[Any] = []

        def traced(*chosen: Any) -> list[Any]:
            values = list(args)
            for number, value in zip(numbers, chosen, strict=True):
                values[number] = value
            result = kept(*values, **kwargs)
            if not _is_loss(result, has_aux):
                return []
            # An auxiliary output may be anything; arrays leave through the jaxpr.
            nonlocal structure
            leaves, structure = jax.tree.flatten(result)
            outputs[:] = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
            outputs[0] = _ARRAY
            return [leaves[0], *(x for x in leaves[1:] if isinstance(x, jax.Array))]

        closed = jax.make_jaxpr(traced)(*chosen)
        if structure is None:
            return reference(*args, **kwargs)  # raises, in JAX's words
        arrays, grads = _evaluate(closed, tree, wanted, read)
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


def _is_loss(result: Any, has_aux: bool) -> bool:
    """Whether JAX would differentiate a function that returns this."""
    if has_aux:
        if not (isinstance(result, tuple | list) and len(result) == 2):
            return False
        result = result[0]
    if not valid_jaxtype(result):
        return False
    aval = jax.typeof(result)
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)


def current_tables(tree: Any, read: Any) -> list[Table | StaleTable]:
    """The leaves, which the state `read` may have to bring up to date."""
    leaves = jax.tree.leaves(tree)
    tables: list[Table | StaleTable] = [Table(x) for x in leaves]
    for node, rows in _exact_tables(tree, read):
        states = table_states(node)
        for place, i in enumerate(rows):
            parts = rows[i], states.at(place), node.constants
            tables[i] = StaleTable(jnp.asarray(leaves[i]), *parts)
    return tables


def _exact_tables(tree: Any, read: Any) -> Iterator[tuple[Any, dict[int, RowState]]]:
    """The states of `exact_adam`, and which leaves each of them holds."""
    leaves, treedef = jax.tree.flatten(tree)
    for node in [] if read is None else exact_states(read, "`read`")[0]:
        if is_exact(node):
            yield node, rows_by_parameter(node, list(map(jnp.shape, leaves)), treedef)


def _evaluate(
    closed: ClosedJaxpr,
    tree: Any,
    wanted: list[bool | None],
    read: Any,
) -> tuple[list[Any], list[Any]]:
    """Evaluates the jaxpr of `(loss, other results)` and its derivatives.

    Returns:
      The results, and the gradient of each leaf, row-sparse where wanted.
    """
    paths, leaves = _with_paths(tree)
    program, tables = Program(RULES), current_tables(tree, read)
    able = _able(program, closed, paths, tables, wanted)
    tables = _read_whole(tree, read, tables, able)
    # What the loss shows is read before tables are written: see `_after`.
    shown = _shown(closed.jaxpr)
    jaxpr = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *shown])
    closed = ClosedJaxpr(jaxpr, closed.consts)
    needed = [True] + [False] * (len(jaxpr.outvars) - 1)
    args = _arguments(tables, able)
    shapes = frozenset(x.shape for x in args if isinstance(x, Expression))
    requests, _ = Walk(program, shapes).plan(closed, args, needed)

    def function(deltas: list[Any], arrays: list[Any]) -> Any:
        rest = iter(arrays)
        values = [x if isinstance(x, Expression) else next(rest) for x in args]
        walk = Walk(program, shapes, iter(deltas))
        results = walk.evaluate(closed, values, needed)
        # Arrays as they are, with their weak types.
        return results[0], ([walk.dense(x) for x in results[1:]], walk.rows)

    deltas = [vary(jnp.zeros(x.delta.shape, x.delta.dtype), x.axes) for x in requests]
    arrays = [x for x in args if not isinstance(x, Expression)]
    (value, (others, rows)), (of_deltas, of_arrays) = jax.value_and_grad(
        function, argnums=(0, 1), has_aux=True
    )(deltas, arrays)
    count = len(jaxpr.outvars) - len(shown)
    everything = [value, *map(jnp.asarray, others)]
    found: dict[int, list[RowSlices]] = {i: [] for i, can in enumerate(able) if can}
    for request, ids, values in zip(requests, rows, of_deltas, strict=True):
        slices = _of_all_devices(request, leaves[request.leaf.index], ids, values)
        found[request.leaf.index].append(_after(slices, everything))
    dense, grads = iter(of_arrays), []
    for i, leaf in enumerate(leaves):
        if i in found:
            depth = program.depths.get(i, 1)
            dtype = jnp.result_type(leaf)
            is_read = isinstance(tables[i], StaleTable)
            grads.append(
                to_bcoo(found[i], jnp.shape(leaf), depth, dtype, is_stale=not is_read)
            )
        else:
            grads.append(next(dense))
    return everything[:count], grads


def _arguments(tables: list[Table | StaleTable], able: list[bool]) -> list[Any]:
    """An expression for each leaf that is able to be row-sparse, arrays for others."""
    args: list[Any] = []
    for i, (source, can) in enumerate(zip(tables, able, strict=True)):
        value = table(source, jnp.shape(source.array), jnp.result_type(source.array), i)
        args.append(value if can else source.array)
    return args


def _read_whole(
    tree: Any, read: Any, tables: list[Table | StaleTable], able: list[bool]
) -> list[Table | StaleTable]:
    """The tables, those that are not only looked up with their values."""
    tables = list(tables)
    for node, rows in _exact_tables(tree, read):
        whole = [i for i in rows if not able[i]]
        values = whole_values(node, rows, {i: tables[i].array for i in whole})
        for i, value in zip(whole, values, strict=True):
            tables[i] = Table(value)
    return tables


def _of_all_devices(
    request: Request, leaf: Any, ids: Any, values: jax.Array
) -> RowSlices:
    """The gradient of the rows of one lookup.

    Inside of `shard_map`, of all devices, over the axes over which rows vary and the
    table does not: under `jax.grad` its gradient is summed over them.
    """
    if request.is_whole:
        ids, values = every_row(ids, values, request.depth)[:2]
    slices = RowSlices(ids, values)
    if request.bags is not None:
        slices = RowSlices(ids.ids, values, ids.segments, ids.weights)
    slices = jax.tree.map(functools.partial(vary, axes=request.axes), slices)
    own = varying_axes(leaf) if request.axes else ()
    axes = tuple(axis for axis in request.axes if axis not in own)
    if axes:
        gather = functools.partial(
            lax.all_gather, axis_name=axes, tiled=True, to="invarying"
        )
        slices = jax.tree.map(gather, slices)
    if request.bags is not None:
        call = jnp.arange(len(slices.indices), dtype=jnp.int32)
        call = call // max(request.bags.entries, 1)
        segments = slices.segments + call * request.bags.bags
        slices = slices._replace(segments=segments)
    return slices


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


def _able(
    program: Program,
    closed: ClosedJaxpr,
    paths: list[KeyPath],
    tables: list[Table | StaleTable],
    wanted: list[bool | None],
) -> list[bool]:
    """Which leaves get a row-sparse gradient; raises where one is named in vain."""
    arrays = [source.array for source in tables]
    able = [
        mark is not False
        and jnp.ndim(array) > 0
        and bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))
        for mark, array in zip(wanted, arrays, strict=True)
    ]
    args = _arguments(tables, able)
    shapes = frozenset(x.shape for x in args if isinstance(x, Expression))
    needed = [True] + [False] * (len(closed.jaxpr.outvars) - 1)
    requests, _ = Walk(program, shapes).plan(closed, args, needed)
    for i, path in enumerate(paths):
        use = program.dense_uses.get(i)
        if wanted[i] and (use is not None or not able[i]):
            raise ValueError(_refusal(path, use))
        able[i] = able[i] and use is None
        if able[i] and not wanted[i]:
            able[i] = not _reads_every_row([x for x in requests if x.leaf.index == i])
    return able


def _reads_every_row(requests: list[Request]) -> bool:
    """Whether all lookups of a table are at constant indices that leave no row out.

    So are those of stacked layers that a Python loop takes one by one. All rows of a
    table, each once, are the dense gradient already.
    """
    rows = {x.constant for x in requests}
    return bool(rows) and None not in rows and len(rows) == requests[0].shape[0]


def _after(slices: RowSlices, results: list[jax.Array]) -> RowSlices:
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
    axes = set(varying_axes(slices.values))
    values = [x for x in results if _is_numeric(x) and axes.issuperset(varying_axes(x))]
    if not values:
        return slices
    place = jnp.int32(0)
    if values[0].ndim == 0:  # the loss, unless it is left out
        place = (_as_float(values[0]) > jnp.inf).astype(jnp.int32)
    numbers = jnp.stack([_some_number(x, place) for x in values])
    is_never = jnp.any(numbers > jnp.inf)
    return slices._replace(indices=jnp.where(is_never, -1, slices.indices))


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


def _refusal(path: KeyPath, use: DenseUse | None) -> str:
    cause = "it has a use other than row lookups"
    if use is not None:
        cause = f"of `{use.primitive}` at {use.line}"
    return (
        f"`sparse` asks for a row-sparse gradient of {leaf_name(path)}, which it "
        f"cannot have because {cause}: it must be made of row lookups only. Let this "
        "leaf have a dense gradient; or stop the gradient of that use with "
        "jax.lax.stop_gradient; or, if that is weight decay, leave it to the optimiser."
    )
