"""`value_and_grad` and `grad` with row-sparse gradients for tables."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import valid_jaxtype

from .._rows.canary import CanaryBCOO
from .._rows.source import Source
from .._rows.stale import StaleState, stale_states
from .arguments import (
    check_argnums,
    check_leaves,
    check_modules,
    leaf_name,
    refuse_new_state,
)
from .differentiate import evaluate_with_gradients
from .expressions import is_array
from .marks import Sparse, is_real, marks_of, requires_sparse
from .nested_reads import is_read_around, reading
from .tracing import as_passed, as_places, floating_point_errors, jit_enabled, trace

KeyPath = tuple[Any, ...]


class PartsOfTables(NamedTuple):
    """`sparse` where leaves are some rows of tables that are elsewhere.

    Their gradients take the way that those of the whole tables would: see `_plan` in
    `differentiate`.

    Attributes:
      sparse: As of `value_and_grad`.
      sizes: How many rows the whole tables have, by the index of the leaf.
    """

    sparse: Sparse
    sizes: Mapping[int, int]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: Sparse = None,
    read: Any = None,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, with row-sparse gradients for embedding tables.

    The model is not changed. A leaf whose gradient is made of row lookups only
    (`table[ids]`, `jnp.take`, `flax.linen.Embed`, `flax.nnx.Embed`,
    `equinox.nn.Embedding`, `haiku.Embed`, ...) comes back as a
    `jax.experimental.sparse.BCOO` of the table's shape that equals `jax.grad`'s: ids
    out of bounds are clamped or dropped as the lookup does. Nothing of the size of the
    table is computed or stored. Every other leaf comes back as from
    `jax.value_and_grad`.

    A leaf that the loss does not use, or looks up no rows of (an empty batch), is
    row-sparse with nothing stored (`nse == 0`), as `None` is in torch, unless it is a
    scalar. The optimisers of this package leave it as it is, at no cost; a dense
    optimiser of optax needs zeros in its place: name the tables by `sparse`.

    The BCOO holds one entry for each row that was looked up, duplicates included, at
    most as many as the table has rows: where a batch looks up more, the gradient comes
    back added up, with `nse` the number of rows and the rows that were not touched as
    padding. `coalesce` adds duplicates up at any time.

    Lookups may stand inside `jit`, `jax.checkpoint`, `lax.scan`, `lax.cond`, `vmap` and
    `shard_map`, and a table may be cast, scaled or passed through other elementwise
    operations before it is looked up. `table[0]`, with a constant, is a lookup of one
    row; only where constants read every row, as a Python loop over stacked layers
    does, the gradient is dense. A `vmap` over stacked tables and their ids is a lookup,
    too, with `n_sparse == 2`. Any other use of a table makes its
    gradient dense: tied output weights, weight decay in the loss, a range with fixed
    bounds (`table[:k]`), `take_along_axis`, a function with a rule of its own that
    takes it, by `jax.custom_vjp` or, as `jax.nn.relu`, `jax.custom_jvp`, a branch that
    returns it, and a `vmap` over the predicate of a `lax.cond` that looks it up. Rows,
    once looked up, may go into any function: `jax.nn.relu(table[ids])`.

    In one jitted step with the update, what the call returns, and what a
    `jax.debug.print` in `fun` shows, is read before the table is updated in place. Old
    rows that the step reads elsewhere make XLA copy the table: see `apply_updates`.
    Under `checkify.index_checks`, lookups out of bounds are found as under `jax.grad`,
    by the kernel, too; the padding of `embedding_bag` and `frozen_lookup` is none.

    Inside of `jax.experimental.jet.jet`, which knows arrays only, gradients are dense.

    `fun` is traced, like under `jax.jit`: Python control flow cannot depend on values
    that are computed in it. Call it inside of `jax.jit`; outside, each call traces
    `fun` again, and arguments of NumPy stay NumPy's: `fun` may decide by them, but what
    it indexes by computed ids is given as `jnp.asarray(x)`.

    Args:
      fun: Function that returns a scalar, or a pair `(scalar, aux)` if `has_aux`.
      argnums: Which positional argument or arguments to differentiate.
      has_aux: Whether `fun` returns a pair.
      holomorphic: Whether `fun` is promised to be holomorphic, of complex arguments:
        then all gradients are dense, and those of `jax.value_and_grad`.
      allow_int: Whether leaves may be integers; their gradients are zeros of the type
        `float0`, as those of `jax.value_and_grad`.
      sparse: `None` gives row-sparse leaves wherever possible, `False` nowhere. `True`
        requires them of all real leaves; a tree of booleans like the differentiated
        argument (a tuple of trees if `argnums` is a sequence), or a prefix of it, or a
        predicate `sparse(path, leaf)` that returns a boolean, exactly where it says so.
        What is required and cannot be raises. A leaf of which `False` is said and that
        the loss does not use gets dense zeros.
      read: The state of an optimiser of the differentiated argument (of all of them in
        a tuple, if `argnums` is a sequence: `tx.init((a, b))`). Where that is
        `exact_adam` or `exact_adamw`, or holds them, a lookup gives each row as dense
        Adam would have it now, and the gradient is taken there; nothing is written. A
        leaf whose gradient is dense is read as it stands: where it has stale rows, that
        raises, and in a compiled program the loss and all gradients are NaN. Rows of
        other optimisers are always up to date: their state changes nothing.

    Returns:
      A function like `fun` that returns `(value, grads)`, or `((value, aux), grads)`.

    Raises:
      TypeError: By the returned function; in `jax.value_and_grad`'s words for a loss
        that is not a real scalar; for a leaf that is not real or complex; for an NNX
        module with more than `nnx.Param`s, which `flax_nnx.value_and_grad` takes; and
        for a mutable variable of Flax, which has a gradient as an ordinary one,
        `nnx.with_vars(params, hijax=False)`.
      ValueError: By the returned function, if `sparse` does not fit the argument, or
        names a leaf whose gradient cannot be row-sparse; it tells the operation in the
        way. If `read` is seen to be no state of an optimiser, that of other parameters,
        or one with stale rows of a leaf whose gradient is dense. If `read` is given
        beside `holomorphic`, or `sparse` requires something there.

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
    checked = refuse_new_state(fun) if callable(fun) else fun
    return differentiated(
        checked,
        argnums,
        has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        sparse=sparse,
        read=read,
    )


def differentiated(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    *,
    holomorphic: bool,
    allow_int: bool,
    sparse: Sparse,
    read: Any,
    check: Callable[[Any], None] = check_modules,
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad` of a function that loses nothing; `check` refuses arguments."""
    sizes: Mapping[int, int] = {}
    if isinstance(sparse, PartsOfTables):
        sparse, sizes = sparse
    reference = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)
    if holomorphic and (read is not None or requires_sparse(sparse)):
        raise ValueError(
            "A holomorphic derivative is one of complex arguments, and dense: there is "
            "no `read`, and `sparse` may require nothing. Leave out `holomorphic=True` "
            "for parameters that are real."
        )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places = as_places(argnums)
        # What JAX does not take is left to JAX, here and below, for its own errors.
        inside = [-len(args) <= place < len(args) for place in places]
        distinct = {place % max(1, len(args)) for place in places}
        if not places or not all(inside) or len(distinct) < len(places):
            return reference(*args, **kwargs)
        chosen = [args[place] for place in places]
        tree = tuple(chosen) if isinstance(argnums, Sequence) else chosen[0]
        check(tree)
        check_leaves(tree, allow_int=allow_int)
        if holomorphic or (sparse is False and not any(_stale_rows(tree, read))):
            return reference(*args, **kwargs)
        wanted = marks_of(sparse, tree)

        def loss(*args: Any) -> Any:
            with reading([args[i] for i in places], tree, read):
                result = fun(*args, **kwargs)
            if not _is_loss(result, has_aux):
                raise _NoLoss
            return result

        try:
            with jit_enabled():
                traced = trace(loss, args, places, has_loss=True)
        except _NoLoss:
            return reference(*args, **kwargs)
        closed, to_result, are_stored = traced
        if _is_in_jet((*jax.tree.leaves(tree), *closed.consts)):
            _refuse_in_jet(is_needed=requires_sparse(sparse) or read is not None)
            return reference(*args, **kwargs)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        tables = current_tables(tree, read)
        are_stale = functools.partial(_are_stale, tree, read)
        with jit_enabled(), floating_point_errors():
            arrays, grads = evaluate_with_gradients(
                closed, are_stored, paths, wanted, tables, are_stale, sizes
            )
        arrays = as_passed(closed, jax.tree.leaves(tree), arrays, are_stored)
        _say_what_was_read(tree, tables, grads)
        return to_result(arrays), jax.tree.unflatten(jax.tree.structure(tree), grads)

    return value_and_grad_fun


def _say_what_was_read(tree: Any, tables: list[Source], grads: list[Any]) -> None:
    """Gradients of stale tables remember by what their rows were read."""
    for leaf, table, grad in zip(jax.tree.leaves(tree), tables, grads, strict=True):
        if table.stale is not None and isinstance(grad, CanaryBCOO):
            grad.read_of = (Source(leaf, table.stale),)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    sparse: Sparse = None,
    read: Any = None,
) -> Callable[..., Any]:
    """Like `jax.grad`, with row-sparse gradients for embedding tables.

    `value_and_grad` without the value; see there.

    Args:
      fun: Function that returns a scalar, or a pair `(scalar, aux)` if `has_aux`.
      argnums: Which positional argument or arguments to differentiate.
      has_aux: Whether `fun` returns a pair.
      holomorphic: Whether `fun` is promised to be holomorphic.
      allow_int: Whether leaves may be integers.
      sparse: Which leaves are to be row-sparse.
      read: State of the optimiser; rows of `exact_adam` are read up to date.

    Returns:
      A function like `fun` that returns the gradients, or `(gradients, aux)`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_sparse_adam as osa
      >>> table, ids = jnp.ones((1000, 4)), jnp.array([3, 7, 3])
      >>> osa.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
      BCOO(float32[1000, 4], nse=3, n_dense=1)
    """
    types = holomorphic, allow_int
    both = value_and_grad(fun, argnums, has_aux, *types, sparse=sparse, read=read)
    return without_value(both, has_aux)


def without_value(both: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The gradients alone, or with `aux`, of what returns a value as well."""

    @functools.wraps(both)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return grad_fun


class _NoLoss(Exception):
    """Raised where JAX would not differentiate what a function returns."""


def _is_in_jet(values: Sequence[Any]) -> bool:
    """Whether `jax.experimental.jet` differentiates what surrounds the call.

    Problem: in `jet(osa.grad(loss), ...)` operations without a rule of `jet` raise a
    KeyError, and so does its arithmetic on the ids and the guard of a row-sparse
    gradient. Cause: `jet` makes a series of each array that a function returns, of
    integers and float8, too. Remedy: gradients are dense there, as those of `jax.grad`;
    its values are known by the name of their type, which is not public. Safe: nothing
    else has that name, and where it changes, the KeyError is back. Test:
    `tests/gradients/test_jet.py`.
    """
    return any(type(x).__name__ == "JetTracer" for x in values)


def _refuse_in_jet(*, is_needed: bool) -> None:
    if is_needed:
        raise ValueError(
            "Inside of jax.experimental.jet.jet gradients are dense, because it has no "
            "series of row ids: there is no `read`, and `sparse` may require nothing. "
            "Leave both out, and `flush` a state of exact_adam before."
        )


def _is_loss(result: Any, has_aux: bool) -> bool:
    """Whether JAX would differentiate a function that returns this."""
    if has_aux:
        if not (isinstance(result, tuple | list) and len(result) == 2):
            return False
        result = result[0]
    if not valid_jaxtype(result):
        return False
    return is_array(result) and jnp.shape(result) == () and is_real(result)


def current_tables(tree: Any, read: Any) -> list[Source]:
    """The leaves; stale where the state `read` has to bring them up to date."""
    leaves = jax.tree.leaves(tree)
    tables = [Source(x) for x in leaves]
    for _, rows in _stale_rows(tree, read):
        for i, (_, stale) in rows.items():
            tables[i] = Source(jnp.asarray(leaves[i]), stale)
    return tables


def _stale_rows(
    tree: Any, read: Any
) -> Iterator[tuple[StaleState, dict[int, tuple[int, Any]]]]:
    """What brings the leaves up to date, by the states that know of them.

    Each has its place in the order of the state.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for node in [] if read is None else stale_states(read, "`read`", tree):
        rows = node.stale_rows(list(map(jnp.shape, leaves)), treedef)
        yield (
            node,
            {
                i: (place, stale)
                for place, (i, stale) in enumerate(rows.items())
                if not is_read_around(leaves[i], read)
            },
        )


def _are_stale(tree: Any, read: Any, places: Sequence[int]) -> Any:
    """Whether one of the leaves at these places has stale rows; raises if known."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    are_stale: Any = False
    for node, rows in _stale_rows(tree, read):
        stale_names = {place: names[i] for i, (place, _) in rows.items() if i in places}
        if stale_names:
            are_stale |= node.refuse_stale(stale_names)
    return are_stale
