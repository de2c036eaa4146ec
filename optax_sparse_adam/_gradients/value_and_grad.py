"""`value_and_grad` and `grad` with row-sparse gradients for tables."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, valid_jaxtype

from .._jax_extras.sharding import mesh_of
from .._jax_extras.varying_axes import vary, varying_axes
from .._rows.resting_state import exact_states, held_by, is_exact, table_states
from .arguments import check_argnums, check_leaves, leaf_name, refuse_new_state
from .backward_slice import BackwardSlice
from .expressions import Expression, StaleTable, Table, table
from .row_slices import RowSlices, to_bcoo
from .rules import RULES
from .walk import DenseUse, Entries, Program, Request, Walk

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
        places = as_places(argnums)
        inside = [-len(args) <= place < len(args) for place in places]
        distinct = {place % max(1, len(args)) for place in places}
        if not places or not all(inside) or len(distinct) < len(places):
            return reference(*args, **kwargs)  # raises, in JAX's words
        chosen = [args[place] for place in places]
        tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        check_leaves(tree)
        if sparse is False and read is None:
            return reference(*args, **kwargs)
        wanted = _wanted(sparse, tree)

        def loss(*args: Any) -> Any:
            result = kept(*args, **kwargs)
            if not _is_loss(result, has_aux):
                raise _NoLoss
            return result

        try:
            closed, to_result = trace(loss, args, places, has_loss=True)
        except _NoLoss:
            return reference(*args, **kwargs)  # raises, in JAX's words
        arrays, grads = _evaluate(closed, tree, wanted, current_tables(tree, read))
        return to_result(arrays), jax.tree.unflatten(jax.tree.structure(tree), grads)

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


class _NoLoss(Exception):
    """Raised where JAX would not differentiate what a function returns."""


def as_places(argnums: Any) -> tuple[int, ...]:
    places = argnums if isinstance(argnums, Sequence) else (argnums,)
    return tuple(map(operator.index, places))


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    places: Sequence[int],
    *,
    has_loss: bool = False,
) -> tuple[ClosedJaxpr, Callable[[Sequence[Any]], Any]]:
    """The jaxpr of a function of the arguments at these places.

    Its results may be anything: the arrays among them leave through the jaxpr, and a
    loss, the first of them, even if it is a Python number.

    Returns:
      The jaxpr, and a function that makes the result of the results of the jaxpr.
    """
    structure: Any = None
    outputs: list[Any] = []

    def traced(*chosen: Any) -> list[Any]:
        values = list(args)
        for place, value in zip(places, chosen, strict=True):
            values[place] = value
        nonlocal structure
        leaves, structure = jax.tree.flatten(fun(*values))
        is_array = [isinstance(x, jax.Array) for x in leaves]
        is_array[:1] = [True] if has_loss else is_array[:1]
        pairs = list(zip(leaves, is_array, strict=True))
        outputs[:] = [_ARRAY if flag else x for x, flag in pairs]
        return [x for x, flag in pairs if flag]

    def to_result(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        results = [next(rest) if x is _ARRAY else x for x in outputs]
        return jax.tree.unflatten(structure, results)

    return jax.make_jaxpr(traced)(*(args[place] for place in places)), to_result


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
    leaves, treedef = jax.tree.flatten(tree)
    tables: list[Table | StaleTable] = [Table(x) for x in leaves]
    for node in [] if read is None else exact_states(read, "`read`")[0]:
        if is_exact(node):
            states, shapes = table_states(node), list(map(jnp.shape, leaves))
            for i, (place, rows) in held_by(node, shapes, treedef).items():
                array = jnp.asarray(leaves[i])
                tables[i] = StaleTable(array, rows, states.at(place), node.constants)
    return tables


def _evaluate(
    closed: ClosedJaxpr,
    tree: Any,
    wanted: list[bool | None],
    tables: list[Table | StaleTable],
) -> tuple[list[Any], list[Any]]:
    """Evaluates the jaxpr of `(loss, other results)` and its derivatives.

    Returns:
      The results, and the gradient of each leaf, row-sparse where wanted.
    """
    paths, leaves = _with_paths(tree)
    # What the loss shows is read before tables are written: see `_after`.
    shown = _shown(closed.jaxpr)
    jaxpr = closed.jaxpr.replace(outvars=[*closed.jaxpr.outvars, *shown])
    closed = ClosedJaxpr(jaxpr, closed.consts)
    program = Program(RULES, BackwardSlice(jaxpr))
    args, requests = _plan(program, closed, paths, tables, wanted)

    def function(deltas: list[Any], of_whole: list[Any], arrays: list[Any]) -> Any:
        rest = iter(arrays)
        values = [x if isinstance(x, Expression) else next(rest) for x in args]
        own = dict(zip(whole, of_whole, strict=True))
        walk = Walk(program, iter(deltas), own)
        results = walk.evaluate(closed, values)
        # Arrays as they are, with their weak types.
        return results[0], ([walk.dense(x) for x in results[1:]], walk.rows)

    deltas = [vary(jnp.zeros(x.delta.shape, x.delta.dtype), x.axes) for x in requests]
    whole = list(dict.fromkeys(x.leaf for x in requests if x.is_whole))
    of_whole = [
        vary(jnp.zeros(leaves[i].shape, dtype), varying_axes(leaves[i]))
        for i, dtype in whole
    ]
    arrays = [x for x in args if not isinstance(x, Expression)]
    (value, (others, rows)), gradients = jax.value_and_grad(
        function, argnums=(0, 1, 2), has_aux=True
    )(deltas, of_whole, arrays)
    count = len(jaxpr.outvars) - len(shown)
    everything = [value, *map(jnp.asarray, others)]
    after = _after(everything)
    slices = [
        after(_of_all_devices(request, leaves[request.leaf.index], entries, values))
        for request, entries, values in zip(requests, rows, gradients[0], strict=True)
    ]
    dense, grads = iter(gradients[2]), []
    for i, leaf in enumerate(leaves):
        if not isinstance(args[i], Expression):
            grads.append(next(dense))
            continue
        pairs = zip(requests, slices, strict=True)
        own = [x for request, x in pairs if request.leaf.index == i]
        totals = zip(whole, gradients[1], strict=True)
        grads.append(
            to_bcoo(
                own,
                [x for leaf, x in totals if leaf.index == i],
                jnp.shape(leaf),
                program.depths.get(i, 1),
                jnp.result_type(leaf),
                is_stale=not isinstance(tables[i], StaleTable),
            )
        )
    return everything[:count], grads


def _plan(
    program: Program,
    closed: ClosedJaxpr,
    paths: list[KeyPath],
    tables: list[Table | StaleTable],
    wanted: list[bool | None],
) -> tuple[list[Any], list[Request]]:
    """What the program is evaluated with, and the deltas that it needs.

    Planned again until nothing changes, as each plan finds out more: which leaves have
    other uses than lookups, how many axes are indexed, and of which leaves at least as
    many rows are looked up as there are. Stacked rows of a loop could need any multiple
    of the memory that `jax.grad` needs; such a leaf has one delta, of its own shape.

    Returns:
      An expression for each leaf whose gradient is row-sparse, arrays for others; and
      the requests.

    Raises:
      ValueError: If a leaf is wanted to be row-sparse that cannot be.
    """
    arrays = [source.array for source in tables]
    able = [
        mark is not False
        and jnp.ndim(array) > 0
        and bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))
        for mark, array in zip(wanted, arrays, strict=True)
    ]
    large: set[int] = set()
    while True:
        before = *able, program.depths.copy(), large
        args = _arguments(tables, able)
        program.plans.clear()
        program.whole.clear()
        program.whole.update(large)
        requests, _ = Walk(program).plan(closed, args)
        large = set()
        for i, path in enumerate(paths):
            own = [x for x in requests if x.leaf.index == i]
            use = program.dense_uses.get(i)
            if wanted[i] and (use is not None or not able[i]):
                raise ValueError(_refusal(path, use))
            able[i] = able[i] and use is None
            if not wanted[i]:
                able[i] = able[i] and not _reads_every_row(own)
            rows = math.prod(jnp.shape(arrays[i])[: program.depths.get(i, 1)])
            if sum(_num_entries(x, arrays[i]) for x in own) > rows:
                large.add(i)
        if before == (*able, program.depths, large):
            return args, requests


def _arguments(tables: list[Table | StaleTable], able: list[bool]) -> list[Any]:
    """An expression for each leaf that is able to be row-sparse, arrays for others."""
    args: list[Any] = []
    for i, (source, can) in enumerate(zip(tables, able, strict=True)):
        value = table(source, jnp.shape(source.array), jnp.result_type(source.array), i)
        array = source.array
        if isinstance(source, StaleTable) and not can:
            array = value.select(lambda x: x, value.shape)
        args.append(value if can else array)
    return args


def _axes_to_gather(request: Request, leaf: Any) -> tuple[str, ...]:
    """Mesh axes over which rows vary and their table does not.

    Inside of `shard_map`, `jax.grad` sums the gradient of such a table over them.
    """
    own = varying_axes(leaf) if request.axes else ()
    return tuple(axis for axis in request.axes if axis not in own)


def _num_entries(request: Request, leaf: Any) -> int:
    """How many entries a request adds to a gradient, those of all devices."""
    sizes = jax.sharding.get_abstract_mesh().shape
    devices = math.prod(sizes[axis] for axis in _axes_to_gather(request, leaf))
    return request.num_entries * devices


def _of_all_devices(
    request: Request, leaf: Any, entries: Entries, values: jax.Array
) -> RowSlices:
    """The gradient of the rows of one lookup; inside of `shard_map`, of all devices."""
    slices = RowSlices(entries.ids, values, entries.segments, entries.weights)
    slices = jax.tree.map(functools.partial(vary, axes=request.axes), slices)
    if axes := _axes_to_gather(request, leaf):
        gather = functools.partial(
            lax.all_gather, axis_name=axes, tiled=True, to="invarying"
        )
        slices = jax.tree.map(gather, slices)
    if slices.segments is not None and request.bags is not None:
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


def _reads_every_row(requests: list[Request]) -> bool:
    """Whether all lookups of a table are at constant indices that leave no row out.

    So are those of stacked layers that a Python loop takes one by one. All rows of a
    table, each once, are the dense gradient already.
    """
    rows = {x.constant for x in requests}
    return bool(rows) and None not in rows and len(rows) == requests[0].shape[0]


def _after(results: list[jax.Array]) -> Callable[[RowSlices], RowSlices]:
    """Makes a gradient depend on all that the call shows, without changing it.

    XLA updates a table in place only where it knows that every read of the old rows
    comes before; else it copies the table to be safe. Reads that the gradient does not
    depend on are those of a loss that is linear in a table, and of auxiliary outputs
    (https://openxla.org/xla/aliasing; an `optimization_barrier` would say so, but XLA
    drops it on CPUs before it looks). So one element of each result is compared with
    infinity: none is above. Inside shard_map, a value that varies over more axes than
    the gradient would make it vary there as well, and is left out.
    (tests/gradients/test_cost_of_steps.py)
    """
    numeric = [x for x in results if _is_numeric(x)]

    @functools.cache
    def is_above_infinity(axes: frozenset[str]) -> jax.Array | None:
        values = [x for x in numeric if axes.issuperset(varying_axes(x))]
        if not values:
            return None
        place = jnp.int32(0)
        if values[0].ndim == 0:  # the loss, unless it is left out
            place = (_as_float(values[0]) > jnp.inf).astype(jnp.int32)
        elements = jnp.stack([_some_element(x, place) for x in values])
        return jnp.any(elements > jnp.inf)

    def after(slices: RowSlices) -> RowSlices:
        never = is_above_infinity(frozenset(varying_axes(slices.values)))
        if never is None:
            return slices
        return slices._replace(indices=jnp.where(never, -1, slices.indices))

    return after


def _is_numeric(x: jax.Array) -> bool:
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _as_float(x: jax.Array) -> jax.Array:
    return jnp.real(x).astype(jnp.float32)


def _some_element(x: jax.Array, place: jax.Array) -> jax.Array:
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
