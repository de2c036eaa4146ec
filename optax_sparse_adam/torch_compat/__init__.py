"""`torch.optim.SparseAdam` on JAX arrays: steps, hooks, groups and checkpoints.

For programs and checkpoints that come from torch. This package keeps what torch's
optimisers keep (parameters, groups, state, hooks) and speaks torch's words; the
arithmetic is that of `optax_sparse_adam`. torch itself is not needed.

Examples:
  >>> import jax.numpy as jnp
  >>> import optax_sparse_adam as osa
  >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
  >>> table, ids = Parameter(jnp.ones((1000, 4))), jnp.array([3, 3, 7])
  >>> optimizer = SparseAdam([table], lr=1e-3)
  >>> loss_and_grad = osa.value_and_grad(lambda table: jnp.sum(table[ids] ** 2))
  >>> for _ in range(2):
  ...     optimizer.zero_grad()
  ...     loss, table.grad = loss_and_grad(table.data)
  ...     optimizer.step()
  >>> [round(float(table.data[i, 0]), 4) for i in (0, 3, 7)]
  [1.0, 0.998, 0.998]
  >>> optimizer.state_dict()["state"][0]["step"]
  2
"""

from ._adafactor import Adafactor as Adafactor
from ._hooks import RemovableHandle as RemovableHandle
from ._hooks import (
    register_optimizer_step_post_hook as register_optimizer_step_post_hook,
)
from ._hooks import register_optimizer_step_pre_hook as register_optimizer_step_pre_hook
from ._optimizer import Optimizer as Optimizer
from ._parameter import Parameter as Parameter
from ._sparse_adam import SparseAdam as SparseAdam
