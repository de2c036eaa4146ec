"""`Adafactor`, as in `torch.optim`, for row-sparse gradients too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._optimizers.by_leaf import update_leaf
from .._optimizers.sparse_adafactor import ADAFACTOR, check_gradient, step_scalars
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
from ._parameter import Gradient, Parameter


def _update_table(table: Table, grad: Gradient, scalars: jax.Array) -> Table:
    param, state = table
    check_gradient(grad, param)
    dtype = accumulator_dtype(grad.dtype, param.dtype)
    sign, count, lr, decay, eps1, eps2, d, weight_decay = scalars.astype(dtype)
    step = step_scalars(
        count,
        lr,
        param.dtype,
        dtype,
        beta2_decay=decay,
        eps=(eps1, eps2),
        d=d,
        weight_decay=weight_decay,
        maximize=False,
    )
    keys = ("row_var", "col_var") if param.ndim > 1 else ("variance",)
    moments = tuple(state[key] for key in keys)
    if param.ndim > 1:  # torch keeps the axes that it averages over
        moments = moments[0].squeeze(-1), moments[1].squeeze(-2)
    step = step._replace(sign=sign)
    delta, moments = update_leaf(ADAFACTOR, grad, param, moments, step)
    new = zip(keys, moments, strict=True)
    return apply_updates(param, delta), {k: x.reshape(state[k].shape) for k, x in new}


class Adafactor(Optimizer):
    """Adafactor: `torch.optim.Adafactor` on JAX arrays.

    The same numbers as torch for dense gradients, by the formula of
    `optax_sparse_adam.sparse_adafactor`, which see, also for what it means with
    row-sparse gradients: torch refuses them.

    Args:
      params: Parameters, pairs `(name, parameter)` or groups; see `Optimizer`.
      lr: Largest relative step, and factor of the weight decay, at least 0: a number,
        an array with one element, or a schedule of optax.
      beta2_decay: Exponent of the step in the decay of the second moment, at most 0.
      eps: Lower bounds, at least 0: of the root of the second moment (`None`: the
        machine epsilon of the parameter's type), and of the parameter's size.
      d: Threshold of the update's root mean square, at least 1.
      weight_decay: Decoupled, at least 0.
      foreach: Has no effect: a group is always updated in one call.
      maximize: Ascend instead of descend.

    Raises:
      ValueError: If an option is out of its range, or a parameter is sparse.
      TypeError: If `params` is not an iterable of parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import Adafactor, Parameter
      >>> weight = Parameter(jnp.ones((3, 2)))
      >>> optimizer = Adafactor([weight])
      >>> weight.grad = jnp.ones((3, 2))
      >>> optimizer.step()
      >>> round(float(weight.data[0, 0]), 4)
      0.99
      >>> {key: x.shape for key, x in optimizer.state_dict()["state"][0].items()}
      {'step': (), 'row_var': (3, 1), 'col_var': (1, 2)}
    """

    _update_tables = staticmethod(compile_for_groups(_update_table))

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        for rule, value, holds in (
            ("Learning rate should be >= 0", lr, callable(lr) or scalar_lr(lr) >= 0),
            ("beta2_decay should be <= 0", beta2_decay, scalar(beta2_decay) <= 0),
            ("epsilon1 should be >= 0", eps[0], eps[0] is None or scalar(eps[0]) >= 0),
            ("epsilon2 should be >= 0", eps[1], scalar(eps[1]) >= 0),
            ("Clipping threshold d should be >= 1", d, scalar(d) >= 1),
            ("weight_decay should be >= 0", weight_decay, scalar(weight_decay) >= 0),
        ):
            if not holds:
                raise ValueError(f"{rule} but is: {value}")
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._refuse("Sparse", is_bcoo, "requires dense parameter tensors")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("foreach", None)

    def _update(self, group: Group, params: list[Parameter]) -> None:
        if any(jnp.iscomplexobj(param.data) for param in params):
            raise RuntimeError("Adafactor does not support complex parameters")
        super()._update(group, params)

    def _as_step(self, step: Any) -> Any:
        return np.array(step, np.float32)

    def _state_shapes(self, group: Group, param: Parameter) -> Shapes:
        shape = param.shape
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def _scalars(self, group: Group, param: Parameter, step: int) -> list[float]:
        eps1, eps2 = group["eps"]
        return [
            -1.0 if group["maximize"] else 1.0,
            step,
            learning_rate(group, step - 1),
            scalar(group["beta2_decay"]),
            float(jnp.finfo(param.dtype).eps) if eps1 is None else scalar(eps1),
            scalar(eps2),
            scalar(group["d"]),
            scalar(group["weight_decay"]),
        ]
