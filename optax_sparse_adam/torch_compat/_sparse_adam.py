"""`SparseAdam`, as in `torch.optim`: row-sparse gradients, the rows they hold."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._optimizers.by_leaf import update_leaf
from .._optimizers.hyperparameters import check_leaf
from .._optimizers.sparse_adam import ADAM, Factors, ScaleBySparseAdamState
from .._rows.apply_updates import apply_updates
from .._rows.checks import is_bcoo
from .._rows.coalesce import accumulator_dtype
from ._optimizer import (
    Group,
    Optimizer,
    Params,
    Shapes,
    Table,
    compile_for_groups,
    learning_rate,
    scalar,
    scalar_lr,
)
from ._parameter import Gradient, Parameter, own

MOMENTS = ("exp_avg", "exp_avg_sq")  # in torch's state; mu and nu in optax's


def _update_table(table: Table, grad: Gradient, scalars: jax.Array) -> Table:
    param, state = table
    check_leaf(grad, param)
    factors = Factors(*scalars.astype(accumulator_dtype(grad.dtype, param.dtype)))
    moments = tuple(state[key] for key in MOMENTS)
    delta, moments = update_leaf(ADAM, grad, None, moments, factors)
    return apply_updates(param, delta), dict(zip(MOMENTS, moments, strict=True))


class SparseAdam(Optimizer):
    """Adam for row-sparse gradients: `torch.optim.SparseAdam` on JAX arrays.

    The same numbers as torch, by the formula of `optax_sparse_adam.sparse_adam`, which
    see, also for `eps`. Only rows that the gradient holds change, parameters and
    moments. Each parameter counts its own steps; one with an empty gradient counts.

    Args:
      params: Parameters, pairs `(name, parameter)` or groups; see `Optimizer`.
      lr: Learning rate, above 0: a number, an array with one element, or a schedule of
        optax, called with the number of the parameter's own steps before this one.
      betas: Decay of the moving averages of the gradient and its square, in `[0, 1)`.
      eps: Added to the root of the uncorrected second moment; above 0.
      maximize: Ascend instead of descend.
      allow_dense: Take dense gradients too, with this formula for all rows, instead of
        refusing them. `Adam` has torch's numbers for them, which differ by the place of
        `eps`.

    Raises:
      ValueError: If an option is out of its range, or a parameter is sparse or complex.
      TypeError: If `params` is not an iterable of parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.experimental.sparse import BCOO
      >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
      >>> users, items = Parameter(jnp.zeros((1000, 2))), Parameter(jnp.zeros((50, 2)))
      >>> groups = [{"params": [users]}, {"params": [items], "lr": 0.1}]
      >>> optimizer = SparseAdam(groups, lr=0.01)
      >>> for table in (users, items):
      ...     data = jnp.ones((1, 2))
      ...     table.grad = BCOO((data, jnp.array([[7]])), shape=table.shape)
      >>> optimizer.step()
      >>> [round(float(table.data[7, 0]), 4) for table in (users, items)]
      [-0.01, -0.1]
    """

    _update_tables = staticmethod(compile_for_groups(_update_table))

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        allow_dense: bool = False,
    ) -> None:
        if not callable(lr) and not scalar_lr(lr) > 0.0:
            raise ValueError(f"Invalid learning rate: {scalar(lr)}")
        if not scalar(eps) > 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for i in (0, 1):
            if not 0.0 <= scalar(betas[i]) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {betas[i]}")
        self.allow_dense = allow_dense
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults)
        self._refuse("Sparse", is_bcoo, "requires dense parameter tensors")
        self._refuse("Complex", jnp.iscomplexobj, "does not support complex parameters")

    def _update(self, group: Group, params: list[Parameter]) -> None:
        if not self.allow_dense and not all(is_bcoo(param.grad) for param in params):
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam "
                "instead. Or pass allow_dense=True: then all rows count as touched."
            )
        super()._update(group, params)

    def _state_shapes(self, group: Group, param: Parameter) -> Shapes:
        return dict.fromkeys(MOMENTS, param.shape)

    def _scalars(self, group: Group, param: Parameter, step: int) -> list[float]:
        # In double precision, where the cancellation in `1 - beta**step` is harmless.
        beta1, beta2 = map(scalar, group["betas"])
        size = learning_rate(group, step - 1) * math.sqrt(1.0 - beta2**step)
        factors = {
            "sign": -1.0 if group.get("maximize", False) else 1.0,
            "one_minus_b1": 1.0 - beta1,
            "one_minus_b2": 1.0 - beta2,
            "eps": scalar(group["eps"]),
            "scale": -size / (1.0 - beta1**step),
        }
        return [factors[name] for name in Factors._fields]

    def to_optax(self, tree: Any) -> ScaleBySparseAdamState:
        """The state with which `optax_sparse_adam.sparse_adam` goes on from here.

        Args:
          tree: A tree of parameters, such as `{"users": users, "items": items}`.

        Returns:
          A copy of their state, with `mu` and `nu` shaped like the tree.

        Raises:
          ValueError: If the parameters have not all made the same number of steps: the
            functional state has one clock for all of them.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> import optax_sparse_adam as osa
          >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
          >>> tree = {"users": Parameter(jnp.zeros((1000, 2)))}
          >>> optimizer = SparseAdam(tree.values(), lr=0.01)
          >>> state = optimizer.to_optax(tree)
          >>> params = jax.tree.map(lambda p: jnp.copy(p.data), tree)
          >>> tx = osa.sparse_adam(0.01)  # tx.update(grads, state), and so on
        """

        def get(key: str, param: Parameter) -> Any:
            shapes = dict.fromkeys(MOMENTS, param.shape)
            return (self.state.get(param) or self._init_state(param, shapes))[key]

        steps = {int(get("step", param)) for param in jax.tree.leaves(tree)}
        if len(steps) > 1:
            raise ValueError(
                "All parameters must have made the same number of steps, got "
                f"{sorted(steps)}. Convert those that differ into states of their own."
            )
        mu, nu = (
            jax.tree.map(lambda param, key=key: jnp.copy(get(key, param)), tree)
            for key in MOMENTS
        )
        return ScaleBySparseAdamState(jnp.array(max(steps), jnp.int32), mu, nu)

    def from_optax(self, tree: Any, state: ScaleBySparseAdamState) -> None:
        """Goes on from a state of `optax_sparse_adam.sparse_adam`.

        The moments are copied, in the type of their parameter. The parameters' own
        arrays are the caller's to set.

        Args:
          tree: A tree of parameters of this optimiser.
          state: The functional state, with `mu` and `nu` shaped like the tree.
        """

        def load(param: Parameter, mu: jax.Array, nu: jax.Array) -> None:
            moments = (own(moment).astype(param.dtype) for moment in (mu, nu))
            arrays = dict(zip(MOMENTS, moments, strict=True))
            self.state[param] = {"step": int(state.count), **arrays}

        jax.tree.map(load, tree, state.mu, state.nu)
