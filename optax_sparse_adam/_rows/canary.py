"""A BCOO that notices when its indices were treated as values.

JAX and optax map over the arrays of a tree, and the indices of a BCOO are one of them:
`optax.scale` multiplies them, `jax.tree.map(jnp.add, g, g)` adds them up, and rows that
nobody looked up would be trained. Gradients of this package, and updates made of them,
therefore carry one more array, the canary: an odd constant `G` beside each index. What
is done to all arrays is done to the canary, too:

    g = osa.grad(lambda table: jnp.sum(table[ids]))(table)  # ids [3, 7]
    g.indices, g.canary  # [[3], [7]], [[G], [G]]
    h = jax.tree.map(lambda x: -2 * x, g)
    h.indices, h.canary  # [[-6], [-14]], [[-2G], [-2G]]

`k * G == G` holds for no other integer `k` than 1, overflow included, because `G` is
odd. A canary of another type or shape raises while tracing, one of other values raises
outside of a program. A program cannot raise for values: there the entries become NaN,
and go to the first rows of the table, as many as are stored, because their own rows are
lost. Zeros in place of everything, as `jax.tree.map(jnp.zeros_like, g)` and a skipped
step of `optax.apply_if_finite` make them, are padding.

All public ways to read a BCOO, its methods and those of `jax.experimental.sparse`, read
its `data` and `indices`, which are therefore properties here: they raise, or are what
the canary lets through. `stored_data` and `stored_indices` are the arrays as they are.
Those of a gradient that has not been through a function of trees are not compared.
Where gradient and update are in one program, XLA folds the comparison of the constants.

A gradient made with `read=` of `exact_adam` has a second column beside its canary: the
clock of the state that its rows were read by; `_ANY` if it stores nothing. An update of
`exact_adam` has `_UPDATE` there. What is made of such an update, as `0.5 * update`, or
of gradients of two clocks, has `_CHANGED`, and is treated like a changed canary.

Known limits: what moves or exchanges entries moves their canary along; what orders or
picks indices by their size, as `jnp.sort`, `cummax` or `jnp.maximum` of two gradients,
leaves it as it is. (A canary that depends on its index would see that, but XLA folds
only constants: 43 fusions in a step of `sparse_adam` in place of 33.) A BCOO made by
hand has no canary and is believed.

Functions of all arrays at once, such as `optax.tree.norm`, would count indices and
canary as values. So there is a fourth array, the guard, of a type that JAX does not
promote with float32: what adds, compares or concatenates numbers of different arrays
raises while tracing. A sum of the guard alone overflows to NaN, for who adds Python's
numbers up.
Known limits: a maximum of each array as a Python number has that of the indices; and
what multiplies floating arrays by a float32 array meets the guard and raises.

**Armed gradients.** `make_train_step` and `flax_nnx.update` ask of an optimiser whether
it takes row-sparse gradients, by tracing it. `scale(-1)` is arithmetic of integers and
of float8, so that the trace of `chain(sparse_adam(0.1), optax.scale(-1))` says yes, and
its program makes NaN. An armed gradient, and what is made of it, has a guard of a type
that JAX selects, moves and fills, but has no arithmetic of: an array of PRNG keys, of
an implementation without random numbers. So that raises, and the caller says what to
do. Not all gradients are armed: what is harmless would raise, too, as `np.asarray` and
`np.testing` on the leaves, `flax.serialization`, `process_allgather`. Known limit: so
does a choice between all arrays and a Python number, `jnp.where(is_good, x, 0)`; one
between these and `jnp.zeros_like(x)` does not.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from jax.extend.core import get_opaque_trace_state
from jax.extend.random import define_prng_impl
from jax.sharding import NamedSharding

from .bag_gradient import BagEntries
from .padding import last_indices
from .source import Source

_CANARY = 1_618_033_989
_GUARD_TYPE, _GUARD = jnp.float8_e4m3fn, 448  # the largest: two of them add up to NaN
_UPDATE, _CHANGED, _ANY = -1, -2, np.iinfo(np.int32).max
_REMEDY = (
    "A transformation that does not know BCOO, such as optax.scale, has changed them "
    "together with the values. Put that chain inside lazy: "
    "optax_sparse_adam.lazy(optax.chain(...)). To map over trees of gradients, let "
    "each be one leaf: is_leaf=lambda x: isinstance(x, BCOO)."
)


def new_canary(indices: jax.Array, read_at: Any = None) -> jax.Array:
    canary = jnp.full((*indices.shape[:-1], 1), _CANARY, jnp.int32)
    if read_at is None:
        return canary
    read_at = jnp.broadcast_to(jnp.asarray(read_at, jnp.int32), canary.shape)
    return jnp.concatenate([canary, read_at], axis=-1)


def new_guard(indices: jax.Array) -> jax.Array:
    return jnp.full((*indices.shape[:-1], 2), _GUARD, _GUARD_TYPE)


@functools.cache
def _armour() -> Any:
    """The implementation of the "random keys" of which armed guards are made."""

    def no_numbers(*_: Any) -> NoReturn:
        raise TypeError(f"The guard of a row-sparse gradient is no key. {_REMEDY}")

    functions = dict.fromkeys(("seed", "split", "random_bits", "fold_in"), no_numbers)
    name = "optax_sparse_adam_guard"
    return define_prng_impl(key_shape=(1,), name=name, tag="guard", **functions)


def _armed_guard(indices: jax.Array) -> jax.Array:
    data = jnp.zeros((*indices.shape[:-1], 1), jnp.uint32)
    keys: jax.Array = jax.random.wrap_key_data(data, impl=_armour())
    return keys


@functools.cache
def _armed_type() -> Any:
    return jax.eval_shape(_armed_guard, jax.ShapeDtypeStruct([0, 1], jnp.int32)).dtype


def _is_armed_guard(x: Any) -> bool:
    return bool(getattr(x, "dtype", None) == _armed_type())


def armed(tree: Any) -> Any:
    """A tree whose row-sparse gradients are armed: see the module."""

    def arm(x: Any) -> Any:
        if not isinstance(x, CanaryBCOO):
            return x
        x = copy.copy(x)
        x.guard = _armed_guard(x.stored_indices)
        return x

    return jax.tree.map(arm, tree, is_leaf=lambda x: isinstance(x, BCOO))


def disarmed(tree: Any) -> Any:
    """A tree that was made of armed gradients, without armed guards."""

    def disarm(x: Any) -> Any:
        return new_guard(x[..., None]) if _is_armed_guard(x) else x

    def of_leaf(x: Any) -> Any:
        if not isinstance(x, CanaryBCOO):
            return disarm(x)
        x = copy.copy(x)
        x.guard = disarm(x.guard)
        return x

    return jax.tree.map(of_leaf, tree, is_leaf=lambda x: isinstance(x, BCOO))


@jax.tree_util.register_pytree_node_class
class CanaryBCOO(BCOO):
    """A BCOO with a canary, `int32` of shape `[*batch, nse, 1]`, behind its indices.

    Its shape is that of one matrix and, in front, the axes that its arrays have more:
    `jax.vmap`, `jax.pmap` and stacking make a batch of matrices of one.

    Attributes:
      canary: The canary; where rows were read up to date, `[*batch, nse, 2]`.
      guard: What no other array can be added to, `[*batch, nse, 2]`. Nobody reads it.
      stored_data: The values, whatever has been done to them.
      stored_indices: The indices, likewise.
      bags: The same entries, by bags; see `bag_gradient`. `None` for all others, and
        for what came out of a function of trees.
      read_of: The tables whose rows were read up to date for it: for an optimiser that
        is given others, or that reads rows itself. `()` for all others, and for what
        came out of a function of trees.
      layout: How the table lies on Explicit mesh axes, if they split it, as the type of
        its dense gradient says; its entries are on all devices.
    """

    canary: jax.Array
    guard: jax.Array
    stored_indices: jax.Array
    bags: BagEntries | None = None
    _stored_data: jax.Array | None = None  # of bags, when it is asked for
    _made_in: Any = None  # the program that bags are of, if they are of one
    read_of: tuple[Source, ...] = ()
    layout: NamedSharding | None = None
    _is_seen = True  # made here, or looked at: `tree_unflatten` makes what is not

    def __init__(self, args: Any, *, shape: Any, read_at: Any = None, **flags: bool):
        super().__init__(args, shape=shape, **flags)
        self.canary = new_canary(self.stored_indices, read_at)
        self.guard = new_guard(self.stored_indices)

    @classmethod
    def of_bags(cls, bags: BagEntries, read_at: Any = None) -> "CanaryBCOO":
        obj = object.__new__(cls)
        obj.stored_indices, obj.canary = bags.indices, new_canary(bags.indices, read_at)
        obj.guard = new_guard(bags.indices)
        obj.bags, obj.indices_sorted, obj.unique_indices = bags, False, False
        obj.shape = bags.shape
        if isinstance(bags.values, jax.core.Tracer):
            obj._made_in = get_opaque_trace_state()
        return obj

    @property
    def stored_data(self) -> Any:
        if self._stored_data is not None or self.bags is None:
            return self._stored_data
        data = self.bags.data
        # `jax.jit` asks more than once for what it returns. In another program, such as
        # the body of a loop, these are that program's own, and are not kept.
        is_own = self._made_in == get_opaque_trace_state()
        if is_own or not isinstance(data, jax.core.Tracer):
            self._stored_data = data
        return data

    @stored_data.setter
    def stored_data(self, data: Any) -> None:
        self._stored_data, self.bags = data, None

    @property
    def data(self) -> Any:
        return self.stored_data if _is_intact(self) else entries(self).data

    @data.setter
    def data(self, data: Any) -> None:
        self.stored_data = data

    @property
    def indices(self) -> Any:
        return self.stored_indices if _is_intact(self) else entries(self).indices

    @indices.setter
    def indices(self, indices: Any) -> None:
        if self.bags is not None:
            self.stored_data = self.stored_data
        self.stored_indices = indices

    # What needs no values does not look at them.
    @property
    def shape_of_data(self) -> tuple[int, ...]:
        if self.bags is not None:
            return self.bags.shape_of_data
        return tuple(self.stored_data.shape)

    dtype = property(lambda self: (self.bags or self.stored_data).dtype)
    nse = property(lambda self: self.stored_indices.shape[-2])
    n_batch = property(lambda self: self.stored_indices.ndim - 2)
    n_sparse = property(lambda self: self.stored_indices.shape[-1])
    n_dense = property(lambda self: len(self.shape_of_data) - 1 - self.n_batch)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stored_indices.shape[:-2], *self._unbatched)

    @shape.setter
    def shape(self, shape: tuple[int, ...]) -> None:
        self._unbatched = tuple(shape[self.n_batch :])

    def __repr__(self) -> str:
        if not all(hasattr(x, "dtype") for x in jax.tree.leaves(self)):
            return "BCOO(<invalid>)"  # in a tree of shapes
        shape, sizes = [*self.shape], f"nse={self.nse}, n_dense={self.n_dense}"
        sizes = f"n_batch={self.n_batch}, {sizes}" if self.n_batch else sizes
        return f"BCOO({self.dtype}{shape}, {sizes})"

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        # NumPy would ask for one number after another: hours for a large table.
        raise TypeError(
            "A row-sparse gradient is no array of NumPy, got one of shape "
            f"{self.shape}. To log it take optax_sparse_adam.gradient_stats(grads): "
            "norms and numbers of touched rows. Its arrays are grad.data and "
            "grad.indices, added up by optax_sparse_adam.coalesce(grad); "
            "grad.todense() is as large as the table."
        )

    def todense(self) -> jax.Array:
        """The gradient as an array, laid out as JAX's would be."""
        grad = copy_with(BCOO, self, self.data, self.indices)
        function: Any = BCOO.todense
        if self.layout is not None and not self.n_batch:
            axes = self.layout.mesh.explicit_axes
            function = jax.sharding.auto_axes(
                function, axes=axes, out_sharding=self.layout
            )
        dense: jax.Array = function(grad)
        return dense

    def tree_flatten(self) -> tuple[Any, Any]:
        flags = (self.indices_sorted, self.unique_indices)
        # The guard is next to the floats, with which it cannot be compared.
        arrays = self.stored_data, self.guard, self.stored_indices, self.canary
        return arrays, (self._unbatched, *flags, self.layout)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> "CanaryBCOO":
        obj = object.__new__(cls)
        obj.stored_data, obj.guard, obj.stored_indices, obj.canary = children
        obj._is_seen = False
        obj._unbatched, obj.indices_sorted, obj.unique_indices, obj.layout = aux_data
        return obj


def _is_intact(grad: CanaryBCOO) -> bool:
    """Whether nothing was done to its indices, as far as it is known.

    Raises:
      TypeError: If the indices or the canary are not integers.
      ValueError: If it is known that they were changed.
    """
    if grad._is_seen:
        return True
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(grad)):
        return True  # a tree of shapes, marks or layouts
    if grad.stored_indices.dtype == jax.dtypes.float0:
        return True  # a tangent, which has none of indices
    check_indices(grad)
    if not _is_known(grad.canary) or (np.asarray(grad.canary[..., 0]) != _CANARY).any():
        return False
    grad._is_seen = True  # and stays so: a concrete array does not change
    return True


def _canary_operator(name: str) -> Callable[..., Any]:
    """An operator of BCOO on the entries that the canary lets through."""
    operator = getattr(BCOO, name)

    def method(self: CanaryBCOO, *args: Any, **kwargs: Any) -> Any:
        grads = [self, *(x for x in args if isinstance(x, CanaryBCOO))]
        for grad in grads:
            check_indices(grad)
        plain = [entries(x) if isinstance(x, CanaryBCOO) else x for x in args]
        result = operator(entries(self), *plain, **kwargs)
        if not isinstance(result, BCOO):
            return result
        return copy_with(maker_of(*grads), result, result.data, result.indices)

    return method


# What scales a gradient, and what `optax.apply_updates` adds an update by.
for _operator in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg"]:
    setattr(CanaryBCOO, f"__{_operator}__", _canary_operator(f"__{_operator}__"))
for _operator in ["astype", "sort_indices", "sum_duplicates"]:
    setattr(CanaryBCOO, _operator, _canary_operator(_operator))


def _clocks(grad: CanaryBCOO) -> jax.Array:
    """The second column of its canary; `_ANY` for entries of zeros."""
    return jnp.where(grad.canary[..., :1] == 0, _ANY, grad.canary[..., 1:])


def lacks_clock(grad: BCOO) -> bool:
    """Whether this gradient was made without `read=`; one made by hand is believed."""
    return isinstance(grad, CanaryBCOO) and grad.canary.shape[-1] == 1


def is_read_up_to_date(grad: Any) -> bool:
    """Whether rows were read up to date for it: its table may hold other numbers."""
    return isinstance(grad, CanaryBCOO) and grad.canary.shape[-1] == 2


def is_read_at(grad: BCOO, clock: jax.Array) -> Any:
    """Whether its rows were read at this clock; a BCOO made by hand is believed."""
    if not isinstance(grad, CanaryBCOO):
        return True
    clocks = _clocks(grad)
    return jnp.all((clocks == clock) | (clocks == _ANY))


def without_clock(grad: BCOO) -> BCOO:
    """The gradient without the second column, which `is_read_at` has seen.

    XLA does not know that no clock is `_CHANGED`, and would compare it for each entry.
    """
    if isinstance(grad, CanaryBCOO):
        grad = copy.copy(grad)
        grad.canary = grad.canary[..., :1]
    return grad


def maker_of(*grads: BCOO, is_same: bool = False) -> Callable[..., BCOO]:
    """What makes a gradient of these, with a canary where they have one.

    Args:
      grads: The gradients.
      is_same: Whether what is made has the same sum.
    """
    canary_grads = [grad for grad in grads if isinstance(grad, CanaryBCOO)]
    if not canary_grads:
        return BCOO
    layout = canary_grads[0].layout
    is_armed = any(_is_armed_guard(grad.guard) for grad in canary_grads)
    if any(map(lacks_clock, canary_grads)):
        return functools.partial(_made_alike, layout, is_armed)
    columns = [_clocks(grad) for grad in canary_grads]
    # Two gradients of clock 5 add up to one of clock 5; with one of clock 6 the sum is
    # `_CHANGED`. So is all that is made of an update, as `_UPDATE` is negative, but its
    # coalesced form (`is_same`). Entries of zeros fit any clock.
    columns.append(jnp.full((*columns[0].shape[:-2], 1, 1), _ANY))
    clocks = jnp.concatenate(columns, axis=-2)
    first = jnp.min(clocks, axis=-2, keepdims=True)
    is_kept = jnp.all((clocks == first) | (clocks == _ANY), axis=-2, keepdims=True)
    is_kept &= is_same | (first >= 0)
    read_at = jnp.where(is_kept, first, _CHANGED)
    read_of = tuple(table for grad in canary_grads for table in grad.read_of)

    def make(args: Any, **kwargs: Any) -> CanaryBCOO:
        grad = _made_alike(layout, is_armed, args, read_at=read_at, **kwargs)
        grad.read_of = read_of
        return grad

    return make


def _made_alike(
    layout: NamedSharding | None, is_armed: bool, *args: Any, **kwargs: Any
) -> CanaryBCOO:
    grad = CanaryBCOO(*args, **kwargs)
    grad.layout = layout
    if is_armed:
        grad.guard = _armed_guard(grad.stored_indices)
    return grad


def as_update(update: Any) -> Any:
    """An update of `exact_adam`, of which nothing else can be made."""
    if isinstance(update, CanaryBCOO):
        update.canary = new_canary(update.stored_indices, _UPDATE)
        update.read_of = ()
    return update


def copy_with(
    make: Callable[..., BCOO], mat: BCOO, data: jax.Array, indices: jax.Array
) -> BCOO:
    """A BCOO with the shape and the flags of `mat`, and a new canary."""
    return make(
        (data, indices),
        shape=mat.shape,
        indices_sorted=mat.indices_sorted,
        unique_indices=mat.unique_indices,
    )


def check_indices(grad: BCOO) -> None:
    """Raises if the indices are known to have changed.

    Raises:
      TypeError: If the indices or the canary are not integers.
      ValueError: If the canary has another shape, or, outside of a program, other
        values.
    """
    canary = getattr(grad, "canary", None)
    indices = grad.stored_indices if isinstance(grad, CanaryBCOO) else grad.indices
    for array in (indices, canary):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(
                "A row-sparse gradient must have integer indices, got indices of type "
                f"{array.dtype} (shape {grad.shape}). {_REMEDY}"
            )
    if canary is None:
        return
    shapes = [(*indices.shape[:-1], columns) for columns in (1, 2)]
    is_beside = canary.ndim >= 2 and canary.shape in shapes
    if is_beside and _is_known(canary) and _is_changed(np.asarray(canary)).any():
        raise ValueError(
            "Nothing may change the updates of exact_adam, by which stale rows are "
            "read, and gradients of two of its steps cannot be added up; got such a "
            f"BCOO (shape {grad.shape}). Scale and clip gradients before exact_adam, "
            "and scale moves by its learning rate."
        )
    if not is_beside or _is_seen_to_change(grad):
        raise ValueError(
            "A row-sparse gradient must have the indices that it was made with, got "
            f"others (shape {grad.shape}). {_REMEDY}"
        )


def _is_seen_to_change(grad: Any) -> bool:
    """Whether an entry was changed, as far as it is known while tracing."""
    if grad._is_seen:  # without a look at its arrays, which bags would expand
        return False
    if not all(map(_is_known, jax.tree.leaves(grad))):
        return False
    # In NumPy: within a program JAX would trace even what is known.
    canary = np.asarray(grad.canary)[..., 0]
    if (canary == _CANARY).all():
        return False
    is_empty = (canary == 0) & is_zero(np.asarray(grad.stored_data), grad.n_batch)
    return not ((canary == _CANARY) | is_empty).all()


def _is_changed(canary: Any) -> Any:
    """Says for each entry whether an update of `exact_adam` was changed."""
    return (canary[..., 1:] == _CHANGED).any(axis=-1, keepdims=True)


def _is_known(x: Any) -> bool:
    is_traced = isinstance(x, jax.core.Tracer)
    return not is_traced and getattr(x, "is_fully_addressable", True)


def is_zero(values: Any, n_batch: int, indices: Any = None) -> Any:
    """Says for each row of values, `[*batch, rows, ...]`, whether all are zero.

    Problem: the gradient of `jnp.sum(table[ids])` takes seconds to compile. Cause: its
    values are constant, and XLA reduces constants while compiling, slowly. Remedy: a
    comparison of the indices, which XLA does not know. Safe, since the smallest integer
    is the index of no row. Test: `tests/rows/test_canary.py`.
    """
    empty = values == 0
    if indices is not None:
        empty |= (indices == jnp.iinfo(indices.dtype).min).any()
    return empty.all(axis=tuple(range(n_batch + 1, values.ndim)))


def entries(
    grad: BCOO, lay_out: Callable[[jax.Array], jax.Array] = lambda x: x
) -> BCOO:
    """The entries that the canary lets through, as a BCOO without a canary.

    Args:
      grad: The gradient; `check_indices` has seen no fault.
      lay_out: Called with each of its arrays, before these are compared.
    """
    if isinstance(grad, CanaryBCOO):
        data, indices = map(lay_out, (grad.stored_data, grad.stored_indices))
        n_batch, empty = grad.n_batch, is_zero(data, grad.n_batch, indices)
        valid, indices = find_intact(empty, indices, lay_out(grad.canary), n_batch)
        shape = (*valid.shape[:-1], *(1,) * (data.ndim - n_batch - 1))
        data = jnp.where(valid.reshape(shape), data, jnp.nan)
    else:
        data, indices = lay_out(grad.data), lay_out(grad.indices)
    return copy_with(BCOO, grad, data, indices)


def find_intact(
    empty: jax.Array, indices: jax.Array, canary: jax.Array, n_batch: int
) -> tuple[jax.Array, jax.Array]:
    """Says which entries are as they were made, `[*batch, nse, 1]`; and the indices."""
    is_intact = (canary[..., :1] == _CANARY) & ~_is_changed(canary)
    is_empty = (canary[..., :1] == 0) & empty[..., None]
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    # Entries that were changed go to the rows 0, 1, ..., where their NaN is seen; those
    # that became zeros are padding. Both are distinct and ascending, as the flags say.
    slot = jax.lax.broadcasted_iota(indices.dtype, indices.shape, n_batch)
    outside = last_indices(slot, n_batch)
    indices = jnp.where(is_intact, indices, jnp.where(is_empty, outside, slot))
    return is_intact | is_empty, indices
