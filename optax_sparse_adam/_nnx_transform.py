"""`flax_nnx.value_and_grad`, `grad` and `evaluate`: a module becomes arrays, and back.

`transform` makes a function of trees of arrays of one of modules, differentiates or
evaluates it by rows, and sees that what the function did to its arguments happens to
them.
"""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import jax
from flax import nnx

from ._gradients import value_and_grad as _sparse
from ._gradients.evaluate import evaluate
from ._gradients.marks import is_predicate
from ._gradients.tracing import AsStored, as_places
from ._nnx_variables import (
    as_result,
    is_mutable,
    leaves_of,
    raw_values,
    set_leaves,
    values_of_now,
    variables_of,
    write,
)

# Names Flax's record of which object inside of the loss is which one outside.
_CONTEXT = "optax_sparse_adam.flax_nnx"


def transform(
    name: str,
    fun: Any,
    *,
    reduce_axes: Sequence[Any],
    graph: bool | None,
    graph_updates: bool | None,
    **options: Any,
) -> Callable[..., Any]:
    """`value_and_grad`, `grad` or `evaluate` of a function; else a decorator."""
    modes = {
        "graph": _current(nnx.set_graph_mode, graph),
        "graph_updates": _current(nnx.set_graph_updates, graph_updates),
    }
    if reduce_axes:
        raise NotImplementedError(
            f"flax_nnx.{name} has no `reduce_axes`, as nnx.{name} has none any more: "
            f"got {reduce_axes!r}. Inside of shard_map, sum over devices by lax.psum."
        )
    if fun is None:
        return functools.partial(transform, name, reduce_axes=(), **modes, **options)
    _check(name, fun, options["argnums"], **modes)
    transformed = _evaluated if name == "evaluate" else _sparse.differentiated
    both = _by_rows(fun, transformed, **modes, **options)
    if name == "value_and_grad":
        return both
    if name == "evaluate":
        return _without_grads(both)
    return _sparse.without_value(both, options["has_aux"])


def _current(context: Any, value: bool | None) -> bool:
    return bool(context.current_value()) if value is None else value


def _check(name: str, fun: Any, argnums: Any, graph: bool, graph_updates: bool) -> None:
    """Refuses what `nnx` refuses when a function is made."""
    inner = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.ismethod(inner) and isinstance(inner.__self__, nnx.Module):
        raise ValueError(
            f"flax_nnx.{name} does not support bound methods. Use the decorator form "
            f"@flax_nnx.{name} or call flax_nnx.{name}(MyClass.method)(instance, ...) "
            "with the unbound method."
        )
    nnx.extract.check_prefix(argnums, "argnums", name, graph, graph_updates)


def _evaluated(
    pure: Callable[..., Any], places: Any, has_aux: bool, *, read: Any, **_: Any
) -> Callable[..., tuple[Any, None]]:
    """`evaluate`, in the form of `differentiated`: there are no gradients."""
    run = evaluate(pure, places, read=read)
    return lambda *args, **keywords: (run(*args, **keywords), None)


def _without_grads(both: Callable[..., tuple[Any, None]]) -> Callable[..., Any]:
    @functools.wraps(both)
    def run(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[0]

    return run


def _by_rows(
    fun: Callable[..., Any],
    transformed: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    graph: bool,
    graph_updates: bool,
    read: Any,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    def by_rows(pure: Any, places: Any, **more: Any) -> Callable[..., Any]:
        """`read` is an object, whose state is that of the call."""
        options["read"] = state_of(read)
        return transformed(pure, places, True, **options | more)

    if not (graph and graph_updates):
        sparse = options["sparse"]
        return _by_tree(fun, argnums, has_aux, graph, by_rows, read, sparse)

    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = inspect.signature(fun).bind(*args, **kwargs)  # model=... is positional
        if not isinstance(fun, functools.partial):
            bound.apply_defaults()  # negative `argnums` count them, as in `nnx`
        wrt = _wrt(argnums, len(bound.args))
        prefix = tuple(map(wrt.get, range(len(bound.args))))
        # A module becomes a tree of arrays, each shared variable in it once. `split_fn`
        # puts what is differentiated in front: `NodeStates((params, rest))`.
        inputs = nnx.to_tree(
            (bound.args, bound.kwargs),
            prefix=(prefix, None),
            split_fn=_split,
            ctxtag=_CONTEXT,
        )
        origins: list[int | None] = []
        assigned: list[tuple[int | None, int | None]] = []
        structure: Any = None

        def pure(*first: Any) -> tuple[Any, Any]:
            tree = _map_states(_with_first, inputs[0], first), inputs[1]
            # Tracers that come out as they went in are known by their identity.
            positions = {id(x): i for i, x in enumerate(jax.tree.leaves(tree))}
            args, kwargs = nnx.from_tree(tree, ctxtag=_CONTEXT, is_inner=True)
            variables = variables_of((args, kwargs))  # kept alive, for their identity
            old = leaves_of(variables)
            out = fun(*args, **kwargs)
            value, aux = _pair(out) if has_aux else (out, None)
            for variable in variables_of((args, kwargs)):
                set_leaves(
                    variable,
                    {
                        k: as_result(x)  # as another one was
                        for (i, k), x in leaves_of([variable]).items()
                        if old.get((i, k)) is not x and id(x) in positions
                    },
                )
            after = nnx.to_tree((_objects((args, kwargs)), aux), ctxtag=_CONTEXT)
            nonlocal structure
            leaves, structure = jax.tree.flatten(after)
            # Variables of the arguments come first, and are written back as they are
            # stored: also one that comes out of a program inside of `fun` as it was, as
            # all do that nnx.jit and nnx.remat return. Of these only what `fun` has
            # changed is returned: JAX would copy a table that a program returns as it
            # was given.
            count = len(jax.tree.leaves(after[0]))
            stored, results = leaves[:count], leaves[count:]
            # For each its position before `fun`, `None` for a new array.
            origins[:] = [positions.get(id(x)) for x in stored]
            # Of variables that `fun` has assigned, made or removed: where they were
            # before, where in `stored` they are.
            places = {id(x): k for k, x in enumerate(stored)}
            new = leaves_of(variables_of((args, kwargs)))
            assigned[:] = [
                (positions.get(id(old.get(i))), places.get(id(new.get(i))))
                for i in old | new
                if old.get(i) is not new.get(i)
            ]
            changed = [x for x in stored if id(x) not in positions]
            return value, (AsStored(changed), results)

        places = tuple(wrt) if isinstance(argnums, Sequence) else min(wrt)
        first = _map_states(_first, inputs[0])
        (value, (changed, results)), grads = by_rows(pure, places)(*first)
        before, rest = jax.tree.leaves(inputs), iter(changed.tree)
        stored = [next(rest) if i is None else before[i] for i in origins]
        pairs = [
            (None if i is None else before[i], None if k is None else stored[k])
            for i, k in assigned
        ]
        values = values_of_now(first, places, state_of(read), pairs)
        for (_, k), value_of_now in zip(assigned, values, strict=True):
            if k is not None:
                stored[k] = value_of_now
        # This is also what updates the arguments.
        _, aux = nnx.from_tree(
            jax.tree.unflatten(structure, [*stored, *results]),
            ctxtag=_CONTEXT,
            is_inner=False,
        )
        return ((value, aux) if has_aux else value), grads

    by_graph = nnx.update_context(_CONTEXT)(value_and_grad_fun)
    return _with_ordinary_variables(fun, by_graph)


def _with_ordinary_variables(
    fun: Callable[..., Any], by_graph: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """`by_graph`, for modules with mutable variables, too.

    JAX makes no gradient of a mutable variable, and in a compiled program Flax's layers
    and transforms do not take them (flax 0.12).
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        arguments = args, kwargs
        if not any(map(is_mutable, nnx.iter_graph(arguments))):
            return by_graph(*args, **kwargs)
        types = {"hijax": False, "ref": False}
        ordinary = nnx.with_vars(arguments, **types, allow_duplicates=True)
        graphdef, _ = nnx.split(ordinary)
        before = {x: jax.tree.leaves(y) for x, y in raw_values(ordinary).items()}
        result = by_graph(*ordinary[0], **ordinary[1])
        new_graphdef, _ = nnx.split(ordinary)
        if new_graphdef != graphdef:
            raise TypeError(
                "The loss has changed the structure of a module with mutable variables "
                "(`hijax=True` or `ref=True`), which would be lost. Let it only set "
                "variables, or pass a module of ordinary ones, `nnx.with_vars(model, "
                "hijax=False, ref=False)`."
            )
        after = raw_values(ordinary)
        for path, node in nnx.iter_graph(arguments):
            if is_mutable((path, node)):
                leaves = jax.tree.leaves(after[path])
                if any(x is not y for x, y in zip_longest(leaves, before[path])):
                    write(node, after[path])
        return result

    return call


def _by_tree(
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    graph: bool,
    by_rows: Callable[..., Any],
    read: Any,
    sparse: Any,
) -> Callable[..., tuple[Any, Any]]:
    """The mode of `nnx` in which modules are trees, by its own functions for that."""
    tree: Any = nnx.extract

    @functools.wraps(fun, updated=())
    def pure(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))
        current, snapshot = tree.snapshot(tree.labeled(args=args, kwargs=kwargs))
        if graph:
            args, kwargs = tree.from_tree2((args, kwargs))
        out = fun(*args, **kwargs)
        if graph:
            out = tree.to_tree2(out)
        tree.check_no_aliases("grad", **current, out=out, check=["out"])
        value, aux = _pair(out) if has_aux else (out, None)
        return value, (AsStored(tree.get_updates(current, snapshot)), aux)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if graph:
            chosen = argnums if isinstance(argnums, Sequence) else (argnums,)
            prefix = tuple(i in chosen for i in range(len(args)))
            args, kwargs = tree.to_tree2((args, kwargs), prefix=(prefix, False))
        variables = tree.check_no_aliases("grad", args=args, kwargs=kwargs)
        marks = _marks_of_tree(sparse, args, argnums) if graph else sparse
        both = by_rows(pure, argnums, check=lambda tree: None, sparse=marks)
        (value, (changed, aux)), grads = both(*args, **kwargs)
        updates = changed.tree
        if graph:
            grads, aux = tree.from_tree2((grads, aux))
        pairs: list[tuple[Any, Any]] = []
        places: list[tuple[Any, int]] = []
        for path, new in itertools.chain.from_iterable(updates):
            if path in variables:
                old = jax.tree.leaves(variables[path].get_raw_value())
                leaves = jax.tree.leaves(new.get_raw_value())
                pairs += zip_longest(old, leaves)
                places += [(new, k) for k in range(max(len(old), len(leaves)))]
        values = values_of_now(args, argnums, state_of(read), pairs)
        for (variable, k), value_of_now in zip(places, values, strict=True):
            set_leaves(variable, {k: value_of_now})
        tree.apply_updates(variables, updates)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_fun


def _marks_of_tree(sparse: Any, args: tuple[Any, ...], argnums: Any) -> Any:
    """`sparse`, of modules and their paths, for the trees that Flax makes of them."""
    tree: Any = nnx.extract
    if not is_predicate(sparse):
        return tree.to_tree2(sparse)
    places = as_places(argnums)
    if not all(-len(args) <= place < len(args) for place in places):
        return sparse  # it will not be called: JAX refuses `argnums`
    chosen = tuple(args[place] for place in places)
    chosen = chosen if isinstance(argnums, Sequence) else chosen[0]
    treedef: Any
    leaves, treedef = jax.tree.flatten(chosen)
    modules = tree.from_tree2(treedef.unflatten(range(len(leaves))))
    pairs = jax.tree_util.tree_leaves_with_path(modules)
    paths = {number: path for path, number in reversed(pairs)}  # the first, if shared
    return treedef.unflatten([sparse(paths[i], x) for i, x in enumerate(leaves)])


def _pair(out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            "With `has_aux=True` the function must return a pair `(loss, aux)`, got "
            f"{type(out).__name__}."
        )
    return out[0], out[1]


def state_of(read: Any) -> Any:
    """The arrays of an optimiser's state."""
    return nnx.as_pure(getattr(read, "opt_state", read))


def _wrt(argnums: Any, num_args: int) -> dict[int, nnx.DiffState]:
    """Positions of the arguments to differentiate, in order, and their filters."""
    wrt: dict[int, nnx.DiffState] = {}
    for argnum in argnums if isinstance(argnums, Sequence) else (argnums,):
        if not isinstance(argnum, nnx.DiffState):
            argnum = nnx.DiffState(argnum, nnx.Param)
        position = operator.index(argnum.argnum)
        if not -num_args <= position < num_args:
            raise TypeError(
                f"`argnums` must be of positional arguments: got {position}, where "
                f"the function was called with {num_args} of them."
            )
        position %= num_args
        if position in wrt:
            raise ValueError(
                f"`argnums` must name each argument once: {position} is repeated. "
                "`nnx.DiffState(i, nnx.Any(...))` takes more than one filter."
            )
        # Filters are compared where arguments share variables; positions are not to be.
        wrt[position] = nnx.DiffState(-1, argnum.filter)
    return wrt


def _split(ctx: nnx.SplitContext, path: Any, wrt: Any, node: Any) -> nnx.NodeStates:
    """`(what is differentiated, the rest)`, or one state of all."""
    if wrt is None:
        return nnx.NodeStates.from_split(*ctx.split(node))
    if isinstance(node, nnx.Variable):  # is differentiated, whatever its type
        return nnx.NodeStates.from_split(*ctx.split(node), nnx.State({}))
    return nnx.NodeStates.from_split(*ctx.split(node, wrt.filter, ...))


def _map_states(function: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(
        function, *trees, is_leaf=lambda x: isinstance(x, nnx.NodeStates)
    )


def _first(x: Any) -> Any:
    return x.states[0] if isinstance(x, nnx.NodeStates) else x


def _with_first(x: Any, value: Any) -> Any:
    if isinstance(x, nnx.NodeStates):
        return x.replace(states=(value, *x.states[1:]))
    return value


def _objects(tree: Any) -> Any:
    """The tree without leaves that `fun` cannot change."""

    def is_object(x: Any) -> bool:
        return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)

    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
