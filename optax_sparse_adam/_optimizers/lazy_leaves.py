"""The arguments of an update, gradients, state and parameters, as lists of leaves."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from .._rows.checks import is_leaf, leaves_like

T = TypeVar("T")
S = TypeVar("S")


class OfTable(NamedTuple, Generic[T]):
    """What an update takes of a table, or makes of it.

    Attributes:
      grad: The gradient; of results the update.
      state: What has the table's rows in the state.
      param: The parameter; `None` where there is none, and of results.
    """

    grad: T
    state: list[T]
    param: T | None = None


class Leaves(NamedTuple, Generic[T]):
    """The leaves of the arguments of an update, or something for each of them.

    As the tables whose rows they hold, for a table 0 and a bias 1 under `optax.adam`:

        grads [0, None]   state [None, 0, None, 0, None]   params [0, None]

    where the state is a count, both first and both second moments.
    """

    grads: list[T]
    state: list[T]
    params: list[T]

    def map(self, function: Callable[..., S], *columns: "Leaves[Any]") -> "Leaves[S]":
        """`function` of each leaf, and of what other columns have for it."""
        parts = zip(self, *columns, strict=True)
        return Leaves(*(list(map(function, *part)) for part in parts))

    def of_table(self, i: int, owners: "Leaves[int | None]") -> OfTable[T]:
        """Those of a table; `owners` says whose rows each leaf has."""
        pairs = zip(self.state, owners.state, strict=True)
        state = [x for x, owner in pairs if owner == i]
        return OfTable(self.grads[i], state, self.params[i])

    def put(self, i: int, owners: "Leaves[int | None]", new: OfTable[T]) -> None:
        """Puts something in their places."""
        places = [at for at, owner in enumerate(owners.state) if owner == i]
        self.grads[i] = new.grad
        for at, x in zip(places, new.state, strict=True):
            self.state[at] = x
        if new.param is not None:
            self.params[i] = new.param


def results_of(updates: list[Any], state: list[Any]) -> Leaves[Any]:
    """What an update returns, as leaves: of each gradient the update, the new state."""
    return Leaves(updates, state, [None] * len(updates))


class Trees(NamedTuple):
    """The structures of the arguments of an update.

    Attributes:
      grads: That of gradients, updates and parameters.
      state: That of the state.
      has_params: Whether there are parameters.
    """

    grads: Any
    state: Any
    has_params: bool

    @classmethod
    def of(cls, updates: Any, state: Any, params: Any) -> tuple["Trees", Leaves[Any]]:
        """The structures, and the leaves; `None` in the place of each parameter."""
        grads, grads_tree = jax.tree.flatten(updates, is_leaf=is_leaf)
        state_leaves, state_tree = jax.tree.flatten(state)
        param_leaves: list[Any] = [None] * len(grads)
        if params is not None:
            param_leaves = leaves_like(grads_tree, params, "Parameters", "gradients")
        trees = cls(grads_tree, state_tree, params is not None)
        return trees, Leaves(grads, state_leaves, param_leaves)

    def update(
        self,
        inner: optax.GradientTransformationExtraArgs,
        extra_args: dict[str, Any],
        leaves: Leaves[Any],
    ) -> Leaves[Any]:
        """An ordinary dense update, of whole arrays or of touched rows."""
        params = self.grads.unflatten(leaves.params) if self.has_params else None
        updates, state = inner.update(
            self.grads.unflatten(leaves.grads),
            self.state.unflatten(leaves.state),
            params,
            **extra_args,
        )
        update_leaves = self.grads.flatten_up_to(updates)
        return results_of(update_leaves, self.state.flatten_up_to(state))


def shape_of(x: Any) -> Any:
    """The shape and the type that it has as an array of JAX; `None` of `None`."""
    if x is None:
        return None
    # A NumPy array of 64-bit numbers has the type that it gets as an array of JAX.
    dtype = jnp.result_type(x) if jnp.isscalar(x) else x.dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype)
