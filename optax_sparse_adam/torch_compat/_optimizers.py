"""`SparseAdam`, `Adam`, `AdamW` and `Adafactor`, as in `torch.optim`.

Each class is a signature and tables; `Optimizer` has what they share, `_formulas` the
arithmetic. Differences from torch: a learning rate may be a schedule, and `foreach`,
`fused` and `capturable` have no effect, because one compiled program always updates a
group. There is no `differentiable`: this program overwrites its arrays.
"""

from typing import Any, ClassVar

from .._rows.checks import is_bcoo
from ._formulas import ADAFACTOR, ADAM, SPARSE_ADAM, Group
from ._optimizer import Optimizer, Params
from ._parameter import Parameter

_BETAS: dict[str, Any] = {
    "Invalid beta parameter at index 0: {betas[0]}": lambda x: 0 <= x.betas[0] < 1,
    "Invalid beta parameter at index 1: {betas[1]}": lambda x: 0 <= x.betas[1] < 1,
}


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among the arguments of a constructor, which are in torch's order."""
    no_options = "self", "params", "allow_dense", "__class__"
    return {name: x for name, x in arguments.items() if name not in no_options}


class SparseAdam(Optimizer):
    """Adam for row-sparse gradients: `torch.optim.SparseAdam` on JAX arrays.

    Its results are torch's, by the formula of `optax_sparse_adam.sparse_adam` (see
    there, also for `eps`). Only rows that the gradient holds change, in parameters and
    moments. Each parameter counts its own steps, but not those in which the loss did
    not use it, nor, other than torch, those of an empty batch (see `step`).

    Args:
      params: Parameters, pairs `(name, parameter)` or groups. See `Optimizer`, also for
        the errors.
      lr: Learning rate, above 0: a number, an array with one element, or a schedule of
        optax, called with the count of the parameter's own steps before this one.
      betas: Decay of the moving averages of the gradient and its square, in `[0, 1)`.
      eps: Added to the root of the uncorrected second moment; above 0.
      maximize: Ascend instead of descend.
      allow_dense: Take dense gradients too, with this formula for all rows, instead of
        refusing them. `Adam` has torch's formula for them, where `eps` is added to the
        corrected root.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam import grad
      >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
      >>> table = Parameter(jnp.zeros((1000, 2)))
      >>> optimizer = SparseAdam([{"params": [table], "lr": 0.1}])
      >>> table.grad = grad(lambda table: jnp.sum(table[7]))(table.data)
      >>> optimizer.step()
      >>> round(float(table.data[7, 0]), 4)
      -0.1
    """

    _formula = SPARSE_ADAM
    _rules: ClassVar = {
        "Invalid learning rate: {lr}": lambda x: x.lr > 0,
        "Invalid epsilon value: {eps}": lambda x: x.eps > 0,
        **_BETAS,
    }

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
        self.allow_dense = allow_dense
        super().__init__(params, _options(locals()))

    def _update(self, group: Group, params: list[Parameter]) -> None:
        if not (self.allow_dense or all(is_bcoo(p.grad) for p in params)):
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam "
                "instead. Or pass allow_dense=True: then all rows count as touched."
            )
        super()._update(group, params)


class Adam(Optimizer):
    r"""Adam for dense gradients: `torch.optim.Adam` on JAX arrays, with its results.

    `eps` is added to the *corrected* root of the second moment, in `SparseAdam` to the
    uncorrected one. A table with row-sparse gradients belongs in a `SparseAdam` beside
    this one. Arguments are torch's; `foreach`, `capturable` and `fused` have no effect.
    """

    _formula = ADAM
    _rules: ClassVar = {
        "Invalid learning rate: {lr}": lambda x: x.lr >= 0,
        "Invalid epsilon value: {eps}": lambda x: x.eps >= 0,
        **_BETAS,
        "Invalid weight_decay value: {weight_decay}": lambda x: x.weight_decay >= 0,
        "differentiable=True: a step overwrites its arrays": (
            lambda x: not x.differentiable
        ),
    }

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(params, _options(locals()))

    def _update(self, group: Group, params: list[Parameter]) -> None:
        used = [p for p in params if getattr(p.grad, "nse", 1)]
        if any(is_bcoo(p.grad) for p in used):
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam "
                "instead. Give it these parameters, and the others to Adam."
            )
        if used:
            super()._update(group, used)


class AdamW(Adam):
    """`Adam` with `decoupled_weight_decay=True`: `torch.optim.AdamW` on JAX arrays."""

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        options = {**_options(locals()), "decoupled_weight_decay": True}
        super(Adam, self).__init__(params, options)


class Adafactor(Optimizer):
    """Adafactor: `torch.optim.Adafactor` on JAX arrays.

    For dense gradients its results are torch's, by the formula of
    `optax_sparse_adam.sparse_adafactor` (see there, also for what it means with
    row-sparse gradients, which torch refuses).

    Args:
      params, maximize: As for `SparseAdam`.
      lr: Largest relative step, and factor of the weight decay, at least 0: a number,
        an array with one element, or a schedule of optax.
      beta2_decay: Exponent of the step in the decay of the second moment, at most 0.
      eps: Lower bounds, at least 0: of the root of the second moment (`None`: the
        machine epsilon of the parameter's type), and of the parameter's size.
      d: Threshold of the update's root mean square, at least 1.
      weight_decay: Decoupled, at least 0.
      foreach: No effect.

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

    _formula = ADAFACTOR
    _rules: ClassVar = {
        "Learning rate should be >= 0 but is: {lr}": lambda x: x.lr >= 0,
        "beta2_decay should be <= 0 but is: {beta2_decay}": lambda x: (
            x.beta2_decay <= 0
        ),
        "epsilon1 should be >= 0 but is: {eps[0]}": lambda x: (x.eps[0] or 0) >= 0,
        "epsilon2 should be >= 0 but is: {eps[1]}": lambda x: x.eps[1] >= 0,
        "Clipping threshold d should be >= 1 but is: {d}": lambda x: x.d >= 1,
        "weight_decay should be >= 0 but is: {weight_decay}": (
            lambda x: x.weight_decay >= 0
        ),
    }

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
        super().__init__(params, _options(locals()))
