"""`Parameter`: an array that an optimiser overwrites, and its gradient.

In place of `torch.nn.Parameter`. A step donates the arrays of parameters and states, so
that XLA overwrites their buffers. These must be theirs alone: `own` copies what is
given. And no gradient may share one; that of `sum(x * y)` with respect to `x` is `y`:

  x.grad = y.data   # a copy, because the address of `y.data` is registered
"""

import copy
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .._rows.bags import as_array
from .._rows.checks import refuse_masked

Gradient = jax.Array | BCOO

Address = tuple[Any, int]  # a device, and where in its memory

# The arrays that steps overwrite, by the addresses of their buffers. The dictionary is
# weak: an array that nothing else holds leaves it.
_overwritten: WeakValueDictionary[Address, jax.Array] = WeakValueDictionary()


def _addresses(array: jax.Array) -> list[Address]:
    """A device and an address for each shard of the array in this process."""
    shards = [shard.data for shard in array.addressable_shards]
    try:
        return [(shard.device, shard.unsafe_buffer_pointer()) for shard in shards]
    except jax.errors.JaxRuntimeError:  # a runtime that does not expose addresses
        return [(None, id(array))]


def register_overwritten(array: jax.Array) -> None:
    """Notes that steps overwrite this array."""
    for address in _addresses(array):
        _overwritten[address] = array


def copy_overwritten(array: jax.Array) -> jax.Array:
    """The array, or a copy if steps overwrite its buffer."""
    # Not objects but addresses are compared: `jax.device_put` to the device where an
    # array already is makes a second array of the same buffer.
    if any(address in _overwritten for address in _addresses(array)):
        return jnp.copy(array)
    return array


def is_array(value: Any) -> bool:
    """Whether this is an array of JAX, NumPy or torch; NumPy's scalars are not."""
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def as_numpy(value: Any) -> np.ndarray:
    """An array of JAX, NumPy or torch, on any device; may share its memory."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        try:
            return np.asarray(value)
        except TypeError:  # torch has no NumPy type for bfloat16, JAX has one
            value = jax.dlpack.from_dlpack(value)
    refuse_masked(value, "A Parameter")
    return np.asarray(value)


def own(value: Any) -> Any:
    """A copy that nothing else holds: an array, or a BCOO of what is sparse."""
    if isinstance(value, BCOO):
        return jax.tree.map(own, value)
    if isinstance(value, jax.Array):
        return jnp.array(value)
    if getattr(value, "is_sparse", False):  # a torch tensor
        value = value.coalesce()
        arrays = (
            own(value.values()),
            as_array(np.array(as_numpy(value.indices().T)), "a Parameter"),
        )
        return BCOO(arrays, shape=tuple(value.shape))
    # JAX shares NumPy's and torch's memory, or reads it later: copy it now.
    return jnp.asarray(np.array(as_numpy(value)))


def _check_concrete(value: Any, what: str) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise RuntimeError(
            f"a Parameter keeps {what} after the function that sets it: set it, and "
            "call step, outside of jit. Compile what computes the gradient, "
            "jax.jit(optax_sparse_adam.value_and_grad(loss))."
        )


class Parameter:
    """An array that an optimiser trains.

    `data` is the parameter's own array, a copy of what was given. `Optimizer.step`
    overwrites it: an array taken from `data` lives until the next step, and using it
    afterwards raises JAX's `RuntimeError: Array has been deleted`. Keep
    `jnp.copy(parameter.data)`, or a NumPy view, which does not change.

    Two parameters are equal only if they are the same object, and each is a leaf:
    `jax.tree.map(lambda p: p.data, tree)` is the tree of arrays. A copied or unpickled
    parameter has an array of its own and, as in torch, no gradient.

    Args:
      data: An array of JAX, NumPy or torch, floating point or complex, any shape.

    Raises:
      RuntimeError: If `data` has integers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> from optax_sparse_adam.torch_compat import Parameter
      >>> table = Parameter(jnp.zeros((1000, 4)))
      >>> table.grad = BCOO((jnp.ones((2, 4)), jnp.array([[3], [7]])), shape=(1000, 4))
      >>> table
      Parameter(float32[1000, 4], grad=BCOO(float32[1000, 4], nse=2, n_dense=1))
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        if not jnp.issubdtype(self.dtype, jnp.inexact):
            raise RuntimeError(
                "Only Tensors of floating point and complex dtype can require "
                f"gradients, got {self.dtype} of shape {self.shape}."
            )

    @property
    def data(self) -> jax.Array:
        """The present array, until the next step. Setting it sets a copy."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        _check_concrete(value, "its array")
        # A table that is sparse itself is held only to be refused, as in torch.
        self.adopt(own(value))

    _grad: Gradient | None = None

    @property
    def grad(self) -> Gradient | None:
        """Gradient (row-sparse, dense or `None`). Setting it replaces, never adds.

        It may be set to an array of JAX, NumPy or torch, a BCOO, or a sparse tensor of
        torch. Setting raises `TypeError` for anything else, and `RuntimeError` for
        another shape or type than the parameter's, and inside of `jit`.
        """
        return self._grad

    @grad.setter
    def grad(self, grad: Any) -> None:
        if grad is None:
            self._grad = None
            return
        if not isinstance(grad, (jax.Array, BCOO)):
            if not is_array(grad):
                raise TypeError(
                    "assigned grad expected to be a Tensor or None but got grad of "
                    f"type {type(grad).__name__}. Assign a BCOO, an array or None."
                )
            grad = own(grad)
        _check_concrete(grad, "its gradient")
        if grad.shape != self.shape:
            raise RuntimeError(
                f"attempting to assign a gradient of size '{list(grad.shape)}' to a "
                f"tensor of size '{list(self.shape)}'. Please ensure that the gradient "
                "and the tensor are the same size"
            )
        if grad.dtype != self.dtype:
            raise RuntimeError(
                f"attempting to assign a gradient with dtype '{grad.dtype}' to a "
                f"tensor of dtype '{self.dtype}'. Cast one of them with astype."
            )
        self._grad = jax.tree.map(copy_overwritten, grad)

    shape = property(lambda self: self._data.shape)
    dtype = property(lambda self: self._data.dtype)

    def adopt(self, data: jax.Array) -> None:
        """Sets `data` to an array that nothing else holds, without a copy."""
        self._data = data
        jax.tree.map(register_overwritten, data)

    def __getstate__(self) -> dict[str, Any]:
        return {"_data": self._data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.adopt(state["_data"])

    def __copy__(self) -> "Parameter":
        return copy.deepcopy(self)  # an array that steps overwrite has one owner

    def __repr__(self) -> str:
        grad: Any = self.grad
        if isinstance(grad, jax.Array):
            grad = f"{grad.dtype}{list(grad.shape)}"
        return f"Parameter({self.dtype}{list(self.shape)}, grad={grad})"
