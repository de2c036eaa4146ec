"""`update` of the optimisers of rows, which can add its updates itself."""

from collections.abc import Callable
from typing import Any

import optax

from .._rows.apply_updates import add_to_param
from .._rows.checks import leaves_like
from .._rows.row_ops import Update
from .._rows.stale import knows_stored_rows

# The updates of all leaves, in the structure of the gradients, and the new state.
Updated = tuple[Any, list[Update], Any]


class RowUpdateFn:
    """The `update` of an optimiser of rows: what `lazy` makes, and exact Adam.

    `make_train_step` and `flax_nnx.update` know it by its type: where `tx.update` is
    one, nothing stands between the optimiser and the addition that could see an update,
    and `add_to_params` serves. Whatever stands around it, or in its place, has another
    `update`, and gets updates as from any optimiser. So has a function with a copy of
    its attributes, as `functools.wraps` makes it.
    """

    def __init__(self, update: Callable[..., Updated]):
        self._update = update

    def __call__(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """The updates and the new state, as the optimiser says.

        Takes any further argument by keyword: for what is inside of `lazy`.
        """
        args = updates, state, params
        with knows_stored_rows():
            treedef, made, new = self._update(*args, adds_to_params=False, **extra_args)
        return treedef.unflatten([x.change for x in made]), new

    def add_to_params(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        **extra_args: Any,
    ) -> tuple[optax.Params, optax.OptState]:
        """The new parameters and the new state: `update`, then `apply_updates`.

        With the same bits. Float32 updates of rows are added in the step of their
        table; a kernel, where it takes that step, adds them while it computes them. All
        other updates are computed first, and then added.

        Args:
          updates: The gradients, as `update` takes them.
          state: The state.
          params: The parameters. Under `jit` donate them, and the state.
          **extra_args: As `update` takes them.

        Raises:
          TypeError: As `update` and `apply_updates` do.
          ValueError: Likewise.
        """
        args = updates, state, params
        with knows_stored_rows():
            treedef, made, new = self._update(*args, adds_to_params=True, **extra_args)
        leaves = leaves_like(treedef, params, "Parameters", "gradients")
        pairs = zip(leaves, made, strict=True)
        sums = [add_to_param(param, x.change) if x.param is None else x.param
                for param, x in pairs]  # fmt: skip
        return treedef.unflatten(sums), new
