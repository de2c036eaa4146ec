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

Known limits: what moves or exchanges entries moves their canary along; what orders or
picks indices by their size, as `jnp.sort`, `cummax` or `jnp.maximum` of two gradients,
leaves it as it is. (A canary that depends on its index would see that, but XLA folds
only constants: 43 fusions in a step of `sparse_adam` in place of 33.) A BCOO made by
hand has no canary and is believed, and so is what functions of JAX, not methods, make
of a gradient, such as `jax.experimental.sparse.bcoo_reduce_sum`. The flags are gone
with another number of entries; as many, picked of several gradients, keep them.

What else a gradient has beside its entries: a second column of the canary, see
`clocks`; the guard, see `canary_arrays`, which may be armed, see `armed`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from .._jax_extras.sharding import layout_of
from .bag_gradient import BagEntries
from .canary_arrays import (
    CANARY,
    REMEDY,
    armed_guard,
    clocks_of,
    find_intact,
    is_armed_guard,
    is_changed,
    is_zero,
    new_marks,
    one_clock,
)
from .named_in_errors import NamedInErrors
from .source import Source


@jax.tree_util.register_pytree_node_class
class CanaryBCOO(BCOO, metaclass=NamedInErrors):
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
    _flagged: int | None = None  # how many entries flags are of; `None`: as many as now

    def __init__(self, args: Any, *, shape: Any, read_at: Any = None, **flags: bool):
        super().__init__(args, shape=shape, **flags)
        self.canary, self.guard = new_marks(self.stored_indices, read_at)

    @classmethod
    def of_bags(cls, bags: BagEntries, read_at: Any = None) -> "CanaryBCOO":
        obj = object.__new__(cls)
        obj.stored_indices = bags.indices
        obj.canary, obj.guard = new_marks(bags.indices, read_at)
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
        parts = [self.stored_indices, *jax.tree.leaves(self)]
        if not all(hasattr(x, "dtype") for x in parts):
            return "BCOO(<invalid>)"  # in a tree of shapes, or of None
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
        layout, of_entries = self.layout, layout_of(grad.indices)
        if layout is None and of_entries is not None:
            layout = of_entries.update(spec=PartitionSpec())
        if layout is not None and not self.n_batch:
            axes = layout.mesh.explicit_axes
            function = jax.sharding.auto_axes(function, axes=axes, out_sharding=layout)
        dense: jax.Array = function(grad)
        return dense

    def tree_flatten(self) -> tuple[Any, Any]:
        flags, flagged = (self.indices_sorted, self.unique_indices), self._flagged
        if any(flags) and flagged is None:
            flagged = self.nse
        # The guard is next to the floats, with which it cannot be compared.
        arrays = self.stored_data, self.guard, self.stored_indices, self.canary
        return arrays, (self._unbatched, *flags, flagged, self.layout)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> "CanaryBCOO":
        obj = object.__new__(cls)
        obj.stored_data, obj.guard, obj.stored_indices, obj.canary = children
        obj._is_seen = False
        obj._unbatched, is_sorted, is_unique, obj._flagged, obj.layout = aux_data
        shape: Any = getattr(obj.stored_indices, "shape", ())
        if obj._flagged is not None and len(shape) > 1 and shape[-2] != obj._flagged:
            # Members of a batch, say, laid end to end: rows of one may be in another.
            is_sorted, is_unique, obj._flagged = False, False, None
        obj.indices_sorted, obj.unique_indices = is_sorted, is_unique
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
    if not _is_known(grad.canary) or (np.asarray(grad.canary[..., 0]) != CANARY).any():
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


def _canary_reduction(name: str) -> Callable[..., Any]:
    """A method of BCOO that takes batches of a gradient apart, or adds them up.

    What has no longer the shape of the table is no gradient of it, and a plain BCOO.
    """
    method_of_bcoo = getattr(BCOO, name)

    def method(self: CanaryBCOO, *args: Any, **kwargs: Any) -> Any:
        check_indices(self)
        plain = entries(self)
        result = method_of_bcoo(plain, *args, **kwargs)
        if not isinstance(result, BCOO) or result.n_sparse != self.n_sparse:
            return result
        if result.shape[result.n_batch :] != self._unbatched:
            return result
        clocks = None
        if not lacks_clock(self):
            clocks = _clocks_of_batch(self, name, *args, **kwargs)
            batch = result.shape[: result.n_batch]
            count = clocks.size // max(1, math.prod(batch))
            clocks = clocks.reshape(*batch, count, 1)
        make = maker_of(self, clocks=clocks)
        return copy_with(make, result, result.data, result.indices)

    return method


def _clocks_of_batch(
    grad: CanaryBCOO, name: str, *args: Any, **kwargs: Any
) -> jax.Array:
    """The clocks of members of a batch, after a method of `_canary_reduction`.

    Not by BCOO's own method: it adds duplicates up, and writes 0 for padding.
    """
    batch = grad.shape[: grad.n_batch]
    clocks = one_clock(clocks_of(grad.canary)).reshape(batch)
    if name == "__getitem__":
        rest = (1,) * len(grad._unbatched)
        return clocks.reshape(*batch, *rest)[args[0]]
    if name == "sum":  # over members, whose clocks are now beside each other
        axes = args[0] if args else kwargs["axis"]
        axes = (axes,) if np.ndim(axes) == 0 else tuple(axes)
        axes = tuple(axis % grad.ndim for axis in axes)
        return jnp.moveaxis(clocks, axes, range(-len(axes), 0))
    return clocks


# What scales a gradient, and what `optax.apply_updates` adds an update by.
for _operator in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "pos"]:
    setattr(CanaryBCOO, f"__{_operator}__", _canary_operator(f"__{_operator}__"))
for _operator in ["astype", "sort_indices", "sum_duplicates"]:
    setattr(CanaryBCOO, _operator, _canary_operator(_operator))
for _operator in ["sum", "__getitem__", "reshape", "update_layout"]:
    setattr(CanaryBCOO, _operator, _canary_reduction(_operator))


def lacks_clock(grad: BCOO) -> bool:
    """Whether this gradient was made without `read=`; one made by hand is believed."""
    return isinstance(grad, CanaryBCOO) and grad.canary.shape[-1] == 1


def maker_of(
    *grads: BCOO, is_same: bool = False, clocks: jax.Array | None = None
) -> Callable[..., BCOO]:
    """What makes a gradient of these, with a canary where they have one.

    Args:
      grads: The gradients.
      is_same: Whether what is made has the same sum.
      clocks: Those of the entries of what is made, if they are not where they were.
    """
    canary_grads = [grad for grad in grads if isinstance(grad, CanaryBCOO)]
    if not canary_grads:
        return BCOO
    layout = canary_grads[0].layout
    is_armed = any(is_armed_guard(grad.guard) for grad in canary_grads)
    if any(map(lacks_clock, canary_grads)):
        return functools.partial(_made_alike, layout, is_armed)
    columns = [clocks_of(grad.canary) for grad in canary_grads]
    if clocks is not None:
        columns = [clocks]
    read_at = one_clock(jnp.concatenate(columns, axis=-2), is_same=is_same)
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
        grad.guard = armed_guard(grad.stored_indices)
    return grad


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
                f"{array.dtype} (shape {grad.shape}). {REMEDY}"
            )
    if canary is None:
        return
    shapes = [(*indices.shape[:-1], columns) for columns in (1, 2)]
    is_beside = canary.ndim >= 2 and canary.shape in shapes
    if is_beside and _is_known(canary) and is_changed(np.asarray(canary)).any():
        raise ValueError(
            "Nothing may change the updates of exact_adam, by which stale rows are "
            "read, and gradients of two of its steps cannot be added up; got such a "
            f"BCOO (shape {grad.shape}). Scale and clip gradients before exact_adam, "
            "and scale moves by its learning rate."
        )
    if not is_beside or _is_seen_to_change(grad):
        raise ValueError(
            "A row-sparse gradient must have the indices that it was made with, got "
            f"others (shape {grad.shape}). {REMEDY}"
        )


def _is_seen_to_change(grad: Any) -> bool:
    """Whether an entry was changed, as far as it is known while tracing."""
    if grad._is_seen:  # without a look at its arrays, which bags would expand
        return False
    if not all(map(_is_known, jax.tree.leaves(grad))):
        return False
    # In NumPy: within a program JAX would trace even what is known.
    canary = np.asarray(grad.canary)[..., 0]
    if (canary == CANARY).all():
        return False
    is_empty = (canary == 0) & is_zero(np.asarray(grad.stored_data), grad.n_batch)
    return not ((canary == CANARY) | is_empty).all()


def _is_known(x: Any) -> bool:
    is_traced = isinstance(x, jax.core.Tracer)
    return not is_traced and getattr(x, "is_fully_addressable", True)


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
