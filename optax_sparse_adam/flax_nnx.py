"""`nnx.value_and_grad` and `nnx.grad` with row-sparse gradients for tables.

`osa.value_and_grad` differentiates trees of arrays. An NNX module is more: its batch
statistics, random keys and caches change in the loss, and it may share variables with
other arguments. The functions here treat a module as those of `nnx` do. They need
Flax, and are imported by choice: `from optax_sparse_adam import flax_nnx`.

**Evaluation.** `nnx.jit(f)(model)` returns all variables of `model` from the program,
and copies each table for that, which takes longer than the evaluation itself.
`nnx.jit(f, graph_updates=False)` returns the variables that `f` changes:

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> @nnx.jit(graph_updates=False)
... def evaluate(model, ids):
...     return jnp.mean(model(ids))
>>> table = nnx.Embed(1000, 4, rngs=nnx.Rngs(0))
>>> evaluate(table, jnp.array([3, 7, 3])).shape
()

A training step, compiled in either way, donates what it changes, the model and the
optimiser: `nnx.jit(donate_argnums=(0, 1))`.

`update` is `nnx.Optimizer.update` with `optax_sparse_adam.apply_updates`, for **GPUs**,
where `optax.apply_updates` adds row-sparse updates by atomics.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from ._exact_adam import flush as _flush
from ._gradients import value_and_grad as _sparse
from ._gradients.arguments import is_mutable_variable
from ._gradients.value_and_grad import Sparse
from ._rows.checks import is_bcoo
from ._train_step import update_params

Argnum = int | nnx.DiffState

# Names Flax's record of which object inside of the loss is which one outside.
_CONTEXT = "optax_sparse_adam.flax_nnx"


def value_and_grad(
    fun: Any = None,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    sparse: Sparse = None,
    read: Any = None,
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, with row-sparse gradients for embedding tables.

    Modules are differentiated by their `nnx.Param`s, or by what the filter of an
    `nnx.DiffState` selects. What `fun` does to its arguments happens to them: batch
    statistics are updated, random keys advance, variables and attributes are set,
    added and deleted, as under `nnx.value_and_grad` in Flax's default mode
    (`graph=True, graph_updates=True`). As there, arguments may share variables, but
    not between one that is differentiated and one that is not, and a module that `fun`
    changes must be an argument, not captured.

    With `graph=False` or `graph_updates=False`, as under `nnx.value_and_grad`, a module
    is a tree of arrays: it is differentiated by all of them, its gradient is a module,
    variables may not be shared, and what `fun` does to variables happens to them.

    In place of mutable variables (`nnx.Variable(..., hijax=True)`, `ref=True`), of
    which JAX makes no gradient, `fun` sees ordinary ones. What it does to them happens
    to the mutable ones; a change of the module's structure raises.

    Which leaves are row-sparse, and what `sparse` means, is said at
    `optax_sparse_adam.value_and_grad`. Variables that `fun` leaves as they are do not
    pass through the program, so that a frozen table costs nothing.

    Args:
      fun: Function that returns a scalar, or a pair `(scalar, aux)` if `has_aux`; `aux`
        may hold modules and variables. Without it, a decorator is returned.
      argnums: Which positional argument or arguments to differentiate: each an integer,
        or `nnx.DiffState(integer, filter)`.
      has_aux: Whether `fun` returns a pair.
      holomorphic: Whether `fun` is promised to be holomorphic.
      allow_int: Whether to differentiate by integers, whose gradients are zeros.
      reduce_axes: Nothing, as in `nnx.value_and_grad`.
      graph: Whether modules are graphs, with shared variables; by default that of
        `nnx.set_graph_mode`.
      graph_updates: Whether changes of the graph reach the arguments; by default that
        of `nnx.set_graph_updates`.
      sparse: Which leaves are to be row-sparse. Paths and trees are those of the
        gradient: `nnx.State`s in place of modules.
      read: The `nnx.Optimizer`, or its `opt_state`: where its transformation contains
        `exact_adam` or `exact_adamw`, lookups see rows as dense Adam would have them
        now. That of another one changes nothing.

    Returns:
      A function like `fun` that returns `(value, grads)`, or `((value, aux), grads)`.
      `grads` is like the differentiated argument, with an `nnx.State` in place of each
      module, whose variables hold arrays and BCOOs, for `nnx.Optimizer.update`.

    Raises:
      NotImplementedError: For `reduce_axes`.
      TypeError: By the returned function, if an argument to differentiate is missing
        or not real, or the loss is no real scalar.
      ValueError: For a bound method of a module, and `argnums` that `nnx` refuses. By
        the returned function, if an argument is named twice, if arguments share
        variables that only one of them differentiates, or for `sparse`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import flax_nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(1000, 4, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(4, rngs=rngs)
      ...     def __call__(self, ids):
      ...         return self.norm(self.embed(ids))
      >>> model = Model(nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, osa.sparse_adam(1e-3), wrt=nnx.Param)
      >>> @nnx.jit(donate_argnums=(0, 1))
      ... def train_step(model, optimizer, ids):
      ...     def loss(model):
      ...         return jnp.mean((model(ids) - 1) ** 2)
      ...     value, grads = flax_nnx.value_and_grad(loss)(model)
      ...     optimizer.update(model, grads)
      ...     return value, grads
      >>> value, grads = train_step(model, optimizer, jnp.array([3, 7, 3]))
      >>> grads.embed.embedding[...]
      BCOO(float32[1000, 4], nse=3, n_dense=1)
      >>> bool(jnp.any(model.norm.mean[...] != 0))  # the running mean
      True
    """

    return _transform(
        "value_and_grad",
        fun,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        reduce_axes=reduce_axes,
        graph=graph,
        graph_updates=graph_updates,
        sparse=sparse,
        read=read,
    )


def _transform(
    name: str,
    fun: Any,
    *,
    reduce_axes: Sequence[Any],
    graph: bool | None,
    graph_updates: bool | None,
    **options: Any,
) -> Callable[..., Any]:
    """`value_and_grad` or `grad` of a function; without one a decorator."""
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
        return functools.partial(_transform, name, reduce_axes=(), **modes, **options)
    _check(name, fun, options["argnums"], **modes)
    both = _value_and_grad(fun, **modes, **options)
    if name == "value_and_grad":
        return both
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


def _value_and_grad(
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    graph: bool,
    graph_updates: bool,
    read: Any,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    def by_rows(pure: Any, places: Any, **more: Any) -> Callable[..., Any]:
        """`read` is an object, whose state is that of the call."""
        options["read"] = _state(read)
        return _sparse.differentiated(pure, places, True, **options, **more)

    if not (graph and graph_updates):
        return _by_tree(fun, argnums, has_aux, graph, by_rows)

    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = inspect.signature(fun).bind(*args, **kwargs)  # model=... is positional
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
        structure: Any = None

        def pure(*first: Any) -> tuple[Any, Any]:
            tree = _map_states(_with_first, inputs[0], first), inputs[1]
            # Tracers that come out as they went in are known by their identity.
            positions = {id(x): i for i, x in enumerate(jax.tree.leaves(tree))}
            args, kwargs = nnx.from_tree(tree, ctxtag=_CONTEXT, is_inner=True)
            out = fun(*args, **kwargs)
            value, aux = _pair(out) if has_aux else (out, None)
            after = nnx.to_tree((_objects((args, kwargs)), aux), ctxtag=_CONTEXT)
            # Only what `fun` has changed is returned: JAX would copy a table that a
            # program returns as it was given.
            # `origins`: for each leaf its position before `fun`, `None` for a new
            # array.
            nonlocal structure
            leaves, structure = jax.tree.flatten(after)
            origins[:] = [positions.get(id(x)) for x in leaves]
            return value, [x for x in leaves if id(x) not in positions]

        places = tuple(wrt) if isinstance(argnums, Sequence) else min(wrt)
        first = _map_states(_first, inputs[0])
        (value, changed), grads = by_rows(pure, places)(*first)
        before, rest = jax.tree.leaves(inputs), iter(changed)
        leaves = [next(rest) if i is None else before[i] for i in origins]
        # This is also what updates the arguments.
        _, aux = nnx.from_tree(
            jax.tree.unflatten(structure, leaves), ctxtag=_CONTEXT, is_inner=False
        )
        return ((value, aux) if has_aux else value), grads

    by_graph = nnx.update_context(_CONTEXT)(value_and_grad_fun)

    @functools.wraps(fun)
    def with_ordinary_variables(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = args, kwargs
        if not any(map(_is_mutable, nnx.iter_graph(given))):
            return by_graph(*args, **kwargs)
        # JAX makes no gradient of a mutable variable, and in a compiled program Flax's
        # layers and transforms do not take them (flax 0.12).
        types = {"hijax": False, "ref": False}
        ordinary = nnx.with_vars(given, **types, allow_duplicates=True)
        graphdef, state = nnx.split(ordinary)
        before = jax.tree.leaves(state)  # kept alive, to be known by their identity
        result = by_graph(*ordinary[0], **ordinary[1])
        new_graphdef, _ = nnx.split(ordinary)
        if new_graphdef != graphdef:
            raise TypeError(
                "The loss has changed the structure of a module with mutable variables "
                "(`hijax=True` or `ref=True`), which would be lost. Let it only set "
                "variables, or pass a module of ordinary ones, `nnx.with_vars(model, "
                "hijax=False, ref=False)`."
            )
        known = set(map(id, before))
        news = dict(nnx.iter_graph(ordinary))
        for path, node in nnx.iter_graph(given):
            if _is_mutable((path, node)):
                new = news[path].get_raw_value()
                if any(id(x) not in known for x in jax.tree.leaves(new)):
                    _write(node, new)
        return result

    return with_ordinary_variables


def _by_tree(
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    graph: bool,
    by_rows: Callable[..., Any],
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
        return value, (tree.get_updates(current, snapshot), aux)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if graph:
            chosen = argnums if isinstance(argnums, Sequence) else (argnums,)
            prefix = tuple(i in chosen for i in range(len(args)))
            args, kwargs = tree.to_tree2((args, kwargs), prefix=(prefix, False))
        variables = tree.check_no_aliases("grad", args=args, kwargs=kwargs)
        both = by_rows(pure, argnums, check=lambda tree: None)
        (value, (updates, aux)), grads = both(*args, **kwargs)
        if graph:
            grads, aux = tree.from_tree2((grads, aux))
        tree.apply_updates(variables, updates)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_fun


def _is_mutable(item: tuple[Any, Any]) -> bool:
    """Whether a node of a graph, with its path, is a mutable variable."""
    node = item[1]
    return isinstance(node, nnx.Variable) and (is_mutable_variable(node) or node.ref)


def _write(variable: Any, value: Any) -> None:
    """Writes into the mutable array of a variable, which whoever shares it sees."""
    raw = variable.get_raw_value()
    if nnx.variablelib.is_array_ref(raw):
        raw[...] = value
    else:
        variable.set_raw_value(value)


def _pair(out: Any) -> tuple[Any, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            "With `has_aux=True` the function must return a pair `(loss, aux)`, got "
            f"{type(out).__name__}."
        )
    return out


def grad(
    fun: Any = None,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    sparse: Sparse = None,
    read: Any = None,
) -> Callable[..., Any]:
    """Like `nnx.grad`, with row-sparse gradients for embedding tables.

    `value_and_grad` without the value; see there, also for the arguments.

    Returns:
      A function like `fun` that returns the gradients, or `(gradients, aux)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_sparse_adam import flax_nnx
      >>> embed, ids = nnx.Embed(1000, 4, rngs=nnx.Rngs(0)), jnp.array([3, 7, 3])
      >>> flax_nnx.grad(lambda embed: jnp.sum(embed(ids)))(embed).embedding[...]
      BCOO(float32[1000, 4], nse=3, n_dense=1)
    """
    return _transform(
        "grad",
        fun,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        reduce_axes=reduce_axes,
        graph=graph,
        graph_updates=graph_updates,
        sparse=sparse,
        read=read,
    )


def update(optimizer: nnx.Optimizer[Any], model: Any, grads: Any, **extra: Any) -> None:
    """`optimizer.update(model, grads)`, with this package's `apply_updates`.

    That adds each row once, and as in `make_train_step`, the kernel adds updates while
    it computes them, where nothing is around the optimiser that could see them.
    `nnx.Optimizer.update` calls `optax.apply_updates`, by which XLA adds rows with
    atomics on a GPU, and which does not see that the indices of an update have been
    changed.

    Args:
      optimizer: The optimiser; its state changes in place.
      model: The module; its parameters change in place.
      grads: Its gradients, by `value_and_grad` or `grad`.
      **extra: What else the transformation takes, as its loss by `value=`.

    Raises:
      TypeError: If a gradient is not what the optimiser takes.
      ValueError: Likewise.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import flax_nnx
      >>> embed, ids = nnx.Embed(1000, 4, rngs=nnx.Rngs(0)), jnp.array([3, 7, 3])
      >>> optimizer = nnx.Optimizer(embed, osa.sparse_adam(1e-3), wrt=nnx.Param)
      >>> grads = flax_nnx.grad(lambda embed: jnp.sum(embed(ids)))(embed)
      >>> flax_nnx.update(optimizer, embed, grads)
    """
    params, pure = nnx.as_pure(nnx.state(model, optimizer.wrt)), _gradients(grads)
    state = _state(optimizer)
    extra = nnx.as_pure(extra)
    params, state, _ = update_params(optimizer.tx, pure, state, params, **extra)
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step[...] += 1


def flush(model: Any, optimizer: nnx.Optimizer[Any]) -> None:
    """Brings all rows of a model up to date that `exact_adam` trains.

    `optax_sparse_adam.flush` for a module and its optimiser, which change in place; see
    there when to call it. Under `nnx.jit` donate both. Rows of another optimiser are
    always up to date, and stay as they are.

    Args:
      model: The module.
      optimizer: Its optimiser.

    Raises:
      ValueError: If the state belongs to other parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import flax_nnx
      >>> embed, ids = nnx.Embed(1000, 4, rngs=nnx.Rngs(0)), jnp.array([3, 7, 3])
      >>> optimizer = nnx.Optimizer(embed, osa.exact_adam(1e-3), wrt=nnx.Param)
      >>> def loss(embed):
      ...     return jnp.sum(embed(ids) ** 2)
      >>> grads = flax_nnx.grad(loss, read=optimizer)(embed)
      >>> _ = optimizer.update(embed, grads)
      >>> flax_nnx.flush(embed, optimizer)
    """
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    params, state = _flush.flush(params, _state(optimizer))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))


def _gradients(tree: Any) -> Any:
    """`nnx.as_pure`, which by mapping over the arrays of a BCOO would expand bags."""

    def pure(x: Any) -> Any:
        if isinstance(x, nnx.Variable):
            return _gradients(x.get_raw_value())
        return x if is_bcoo(x) else nnx.as_pure(x)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, nnx.Variable) or is_bcoo(x)

    return jax.tree.map(pure, tree, is_leaf=is_leaf)


def _state(read: Any) -> Any:
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
