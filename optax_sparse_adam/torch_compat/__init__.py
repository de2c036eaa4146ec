"""torch.optim's classes on JAX arrays: `step`, hooks, param groups, `state_dict`.

For programs and checkpoints that come from torch. `SparseAdam` trains tables with
row-sparse gradients; `Adam`, `AdamW` and `Adafactor` train dense parameters. They have
torch's options, states and results, and read and write torch's checkpoints. torch
itself is not needed.

Examples:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> import optax_sparse_adam as osa
  >>> from optax_sparse_adam.torch_compat import Adam, Parameter, SparseAdam
  >>> def loss(table, weight, ids):
  ...     return jnp.sum((table[ids] @ weight) ** 2)
  >>> loss_and_grads = jax.jit(osa.value_and_grad(loss, argnums=(0, 1)))
  >>> table, weight = Parameter(jnp.ones((1000, 4))), Parameter(jnp.ones(4))
  >>> optimizers = SparseAdam([table], lr=1e-3), Adam([weight], lr=1e-2)
  >>> for ids in jnp.array([[3, 3, 7], [3, 3, 7]]):
  ...     value, grads = loss_and_grads(table.data, weight.data, ids)
  ...     table.grad, weight.grad = grads
  ...     for optimizer in optimizers:
  ...         optimizer.step()
  >>> [round(float(table.data[i, 0]), 4) for i in (0, 3, 7)]
  [1.0, 0.998, 0.998]
  >>> round(float(weight.data[0]), 4)
  0.98
  >>> optimizers[0].state_dict()["state"][0]["step"]
  2
"""

# ruff: noqa: I001  # in groups, not in the order of the alphabet

# Parameters and optimisers.
from ._parameter import Parameter as Parameter
from ._optimizer import Optimizer as Optimizer
from ._optimizers import SparseAdam as SparseAdam
from ._optimizers import Adam as Adam
from ._optimizers import AdamW as AdamW
from ._optimizers import Adafactor as Adafactor

# Pooled lookups.
from ._embedding_bag import embedding_bag as embedding_bag

# Hooks around the steps of all optimisers.
from ._hooks import RemovableHandle as RemovableHandle
from ._hooks import (
    register_optimizer_step_post_hook as register_optimizer_step_post_hook,
)
from ._hooks import register_optimizer_step_pre_hook as register_optimizer_step_pre_hook
