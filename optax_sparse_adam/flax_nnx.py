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
... def evaluation(model, ids):
...     return jnp.mean(model(ids))
>>> table = nnx.Embed(1000, 4, rngs=nnx.Rngs(0))
>>> evaluation(table, jnp.array([3, 7, 3])).shape
()

Under `exact_adam` it has to read rows of now, by `evaluate` of this module.

A training step, compiled in either way, donates what it changes, the model and the
optimiser: `nnx.jit(donate_argnums=(0, 1))`.

`update` is `nnx.Optimizer.update` with `optax_sparse_adam.apply_updates`, for **GPUs**,
where `optax.apply_updates` adds row-sparse updates by atomics.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from flax import nnx

from ._exact_adam import flush as _flush
from ._gradients.marks import Sparse
from ._nnx_transform import state_of, transform
from ._rows.checks import is_bcoo
from ._train_step import params_at_once

Argnum = int | nnx.DiffState
_P = ParamSpec("_P")
_T = TypeVar("_T")


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
        may hold modules and variables: those of arguments are these themselves. Without
        it, a decorator is returned.
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
        now. That of another one changes nothing. What is differentiated has to be what
        `exact_adam` trains: `argnums=nnx.DiffState(0, optimizer.wrt)`, where that is
        not `nnx.Param`; and with `graph=False` or `graph_updates=False`, a module that
        has no other variables.

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
        variables that only one of them differentiates, for `sparse`, or if the loss
        assigns or replaces a variable whose rows `read` brings up to date.

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

    return transform(
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


def _called_like(
    like: Callable[_P, Any],
) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    """Gives a function of keyword arguments the signature of another one."""
    signature = inspect.signature(like)

    def decorator(function: Callable[..., _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(**bound.arguments)

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorator


@_called_like(value_and_grad)
def grad(**arguments: Any) -> Callable[..., Any]:
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
    return transform("grad", **arguments)


def evaluate(
    fun: Any = None,
    argnums: Argnum | Sequence[Argnum] = 0,
    *,
    read: Any = None,
) -> Callable[..., Any]:
    """`optax_sparse_adam.evaluate` of modules: lookups read rows as they are now.

    Between two steps of `exact_adam` a module holds projected values. With
    `read=optimizer` a function of it is evaluated at those that dense Adam would have,
    and a table in its result has them; nothing is written. Another optimiser changes
    nothing, and on a CPU lookups go through the kernel where it is faster.

    Call it in a function under `nnx.jit(graph_updates=False)`, which copies no table.

    Args:
      fun: Function of modules, of any result. Without it, a decorator is returned.
      argnums: Which positional argument or arguments hold the parameters: each an
        integer, or `nnx.DiffState(integer, filter)` if these are not its `nnx.Param`s.
      read: The `nnx.Optimizer`, or its `opt_state`.

    Returns:
      A function with the arguments and results of `fun`. What `fun` does to its
      arguments happens to them, as under `value_and_grad` in Flax's default mode.

    Raises:
      ValueError: As `value_and_grad`; by the returned function, if the state is that of
        other parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import flax_nnx
      >>> embed = nnx.Embed(1000, 4, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(embed, osa.exact_adam(1e-3), wrt=nnx.Param)
      >>> @nnx.jit(graph_updates=False)
      ... def predict(embed, optimizer, ids):
      ...     return flax_nnx.evaluate(lambda embed: embed(ids), read=optimizer)(embed)
      >>> predict(embed, optimizer, jnp.array([3, 7])).shape
      (2, 4)
    """
    return transform(
        "evaluate",
        fun,
        argnums=argnums,
        has_aux=False,
        reduce_axes=(),
        graph=True,
        graph_updates=True,
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
      grads: Its gradients, by `value_and_grad` or `grad`. As there, those of variables
        that the optimiser has no `wrt` for are left out.
      **extra: What else the transformation takes, as its loss by `value=`.

    Raises:
      TypeError: If a gradient is not what the optimiser takes, such as a row-sparse one
        that a part of it takes for dense; with a note (PEP 678) if it would take
        another form.
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
    params = nnx.as_pure(_state(optimizer, model))
    # As `nnx.Optimizer.update`; gradients without variables are taken as they are.
    pure = _gradients(_state(optimizer, grads) or grads)
    state = state_of(optimizer)
    extra = nnx.as_pure(extra)

    args = optimizer.tx, pure, state, params
    new_params, new_state = params_at_once("flax_nnx.update", *args, **extra)
    nnx.update(model, new_params)
    nnx.update(optimizer.opt_state, nnx.state(new_state))
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
    params = nnx.as_pure(_state(optimizer, model))
    params, state = _flush.flush(params, state_of(optimizer))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))


def _state(optimizer: nnx.Optimizer[Any], tree: Any) -> Any:
    """The variables of a module, or of its gradients, that the optimiser trains."""
    return nnx.state(tree, optimizer.wrt, graph=optimizer.graph)


def _gradients(tree: Any) -> Any:
    """`nnx.as_pure`, which by mapping over the arrays of a BCOO would expand bags."""

    def pure(x: Any) -> Any:
        if isinstance(x, nnx.Variable):
            return _gradients(x.get_raw_value())
        return x if is_bcoo(x) else nnx.as_pure(x)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, nnx.Variable) or is_bcoo(x)

    return jax.tree.map(pure, tree, is_leaf=is_leaf)
