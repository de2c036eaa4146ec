"""torch.optim's classes on JAX arrays: `step`, hooks, param groups, `state_dict`.

For programs and checkpoints that come from torch. `SparseAdam` trains tables with
row-sparse gradients; `Adam`, `AdamW` and `Adafactor` train dense parameters. They have
torch's options, states and results, and read and write torch's checkpoints. torch
itself is not needed.

Examples:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> import optax_sparse_adam as osa
  >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
  >>> loss_and_grad = jax.jit(osa.value_and_grad(lambda t, ids: jnp.sum(t[ids] ** 2)))
  >>> table = Parameter(jnp.ones((1000, 4)))
  >>> optimizer = SparseAdam([table], lr=1e-3)
  >>> for ids in jnp.array([[3, 3, 7], [3, 3, 7]]):
  ...     value, table.grad = loss_and_grad(table.data, ids)
  ...     optimizer.step()
  >>> [round(float(table.data[i, 0]), 4) for i in (0, 3, 7)]
  [1.0, 0.998, 0.998]
"""

# ruff: noqa: I001  # in groups, not in the order of the alphabet

# Parameters and optimisers.
from ._parameter import Parameter as Parameter
from ._optimizer import Optimizer as Optimizer
from ._optimizers import SparseAdam as SparseAdam
from ._optimizers import Adam as Adam
from ._optimizers import AdamW as AdamW
from ._optimizers import Adafactor as Adafactor

# Their states as those of optax, and back.
from ._states import to_state as to_state
from ._states import from_state as from_state

# Hooks around the steps of all optimisers.
from ._hooks import RemovableHandle as RemovableHandle
from ._hooks import (
    register_optimizer_step_post_hook as register_optimizer_step_post_hook,
)
from ._hooks import register_optimizer_step_pre_hook as register_optimizer_step_pre_hook
