"""`Adam` and `AdamW`, as in `torch.optim`: dense gradients, all rows."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._optimizers.hyperparameters import check_leaf
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
from ._sparse_adam import MOMENTS


class Scalars(NamedTuple):
    """The scalars of one step."""

    sign: Any  # of the gradient: -1 to maximize
    decay: Any  # added to the gradient, times the parameter
    keep: Any  # factor of the parameter: the decoupled decay
    beta1: Any
    one_minus_beta1: Any
    beta2: Any
    one_minus_beta2: Any
    eps: Any
    scale: Any  # of the update: step size and bias corrections


def _update_table(table: Table, grad: Gradient, scalars: jax.Array) -> Table:
    """The formula, on whole arrays.

    Not `optax.adam`: its `1 - b2**t` in float32 is off by 1e-4 of its size in the first
    steps, and `optax.amsgrad` takes the maximum of the corrected second moments, torch
    that of the uncorrected ones.
    """
    param, state = table
    check_leaf(grad, param)
    dtype = accumulator_dtype(grad.dtype, param.dtype)
    s = Scalars(*scalars.astype(dtype))
    wide_param, wide_grad = param.astype(dtype), s.sign * grad.astype(dtype)
    # torch leaves out a decay of 0, which would turn an infinite parameter into NaN.
    wide_grad += jnp.where(s.decay == 0, 0, s.decay * wide_param)

    new = {key: array.astype(dtype) for key, array in state.items()}
    new["exp_avg"] = s.beta1 * new["exp_avg"] + s.one_minus_beta1 * wide_grad
    new["exp_avg_sq"] = s.beta2 * new["exp_avg_sq"] + s.one_minus_beta2 * wide_grad**2
    second = new["exp_avg_sq"]
    if "max_exp_avg_sq" in new:
        second = new["max_exp_avg_sq"] = jnp.maximum(new["max_exp_avg_sq"], second)
    update = s.scale * new["exp_avg"] / (jnp.sqrt(second) + s.eps)

    state = {key: new[key].astype(array.dtype) for key, array in state.items()}
    return (s.keep * wide_param + update).astype(param.dtype), state


def _stores_nothing(grad: Any) -> bool:
    return is_bcoo(grad) and grad.nse == 0


class Adam(Optimizer):
    r"""Adam for dense gradients: `torch.optim.Adam` on JAX arrays.

    The same numbers as torch. For a gradient :math:`g` of the parameter :math:`p`, to
    which :math:`\lambda p` has been added, at step :math:`t`, each parameter counting
    its own steps:

    .. math::

      m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
      v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
      p &\leftarrow p - \alpha \frac{m / (1 - \beta_1^t)}
        {\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    With `amsgrad` the largest :math:`v` so far is in the place of :math:`v` in the
    last line. With `decoupled_weight_decay` the decay is not part of :math:`g`; instead
    :math:`p` is multiplied by :math:`1 - \alpha \lambda` first.

    `eps` is added to the *corrected* root, in `SparseAdam` to the uncorrected one: with
    the default `betas` the same `eps` acts 31.6 times as strongly there at the first
    step. A table with row-sparse gradients belongs in a `SparseAdam` beside this one.

    Args:
      params: Parameters, pairs `(name, parameter)` or groups; see `Optimizer`.
      lr: Learning rate, at least 0: a number, an array with one element, or a schedule
        of optax, called with the number of the parameter's own steps before this one.
      betas: Decay of the moving averages of the gradient and its square, in `[0, 1)`.
      eps: Added to the root of the corrected second moment; at least 0.
      weight_decay: :math:`\lambda`, at least 0.
      amsgrad: Divide by the largest second moment so far; one more array of state.
      foreach: Has no effect: a group is always updated in one call.
      maximize: Ascend instead of descend.
      capturable: Has no effect: a step is always compiled.
      differentiable: Must be `False`: a step overwrites its arrays.
      fused: Has no effect: a step is always one program.
      decoupled_weight_decay: Decay as in `AdamW`.

    Raises:
      ValueError: If an option is out of its range, or a parameter is sparse or complex.
      TypeError: If `params` is not an iterable of parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import Adam, Parameter
      >>> weight = Parameter(jnp.ones((3, 2)))
      >>> optimizer = Adam([weight], lr=0.1)
      >>> weight.grad = jnp.full((3, 2), 5.0)
      >>> optimizer.step()
      >>> round(float(weight.data[0, 0]), 4)
      0.9
      >>> list(optimizer.state_dict()["state"][0])
      ['step', 'exp_avg', 'exp_avg_sq']
    """

    _update_tables = staticmethod(compile_for_groups(_update_table))

    def __init__(
        self,
        params: Params,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if not callable(lr) and not scalar_lr(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {scalar(lr)}")
        if not scalar(eps) >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for i in (0, 1):
            if not 0.0 <= scalar(betas[i]) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {betas[i]}")
        if not scalar(weight_decay) >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)
        self._refuse("Sparse", is_bcoo, "requires dense parameter tensors")
        self._refuse("Complex", jnp.iscomplexobj, "does not support complex parameters")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")

    def _check_group(self, new: Group) -> None:
        super()._check_group(new)
        _refuse_differentiable(new)

    def _check_options(self, index: int, saved: Group) -> None:
        super()._check_options(index, saved)
        _refuse_differentiable(saved)
        if "amsgrad" not in saved:  # all other options of RAdam and Adamax are Adam's
            raise ValueError(
                f"loaded state dict has no option amsgrad in group {index}, so it is "
                f"not {type(self).__name__}'s: load it into the class of the optimizer "
                "that saved it. If that was an Adam older than the option, set amsgrad "
                "to False in the loaded group."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # saved by a torch without these options
            group.setdefault("maximize", False)
            group.setdefault("foreach", None)
            group.setdefault("capturable", False)
            group.setdefault("differentiable", False)
            group.setdefault("decoupled_weight_decay", False)
            group.setdefault("fused", None)

    def _update(self, group: Group, params: list[Parameter]) -> None:
        # What the loss does not use has a gradient with nothing stored: torch's None.
        params = [param for param in params if not _stores_nothing(param.grad)]
        if any(is_bcoo(param.grad) for param in params):
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam "
                "instead. Give it these parameters, and the others to Adam."
            )
        super()._update(group, params)

    def _as_step(self, step: Any) -> Any:
        return np.array(step, np.float32)

    def _state_shapes(self, group: Group, param: Parameter) -> Shapes:
        keys = (*MOMENTS, "max_exp_avg_sq") if group["amsgrad"] else MOMENTS
        return dict.fromkeys(keys, param.shape)

    def _scalars(self, group: Group, param: Parameter, step: int) -> list[float]:
        # In double precision, where the cancellation in `1 - beta**step` is harmless.
        beta1, beta2 = map(scalar, group["betas"])
        lr, decay = learning_rate(group, step - 1), scalar(group["weight_decay"])
        decoupled = group["decoupled_weight_decay"]
        # The formula divides the second moment by `root**2`; with numerator and
        # denominator multiplied by `root` no element needs that division.
        root = math.sqrt(1.0 - beta2**step)
        scalars = Scalars(
            sign=-1.0 if group["maximize"] else 1.0,
            decay=0.0 if decoupled else decay,
            keep=1.0 - lr * decay if decoupled else 1.0,
            beta1=beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            eps=scalar(group["eps"]) * root,
            scale=-lr * root / (1.0 - beta1**step),
        )
        return list(scalars)


class AdamW(Adam):
    """Adam with decoupled weight decay: `torch.optim.AdamW` on JAX arrays.

    `Adam` with `decoupled_weight_decay=True`: each step multiplies the parameter by
    `1 - lr * weight_decay` and then makes Adam's step, whose moments do not see the
    decay.

    Args:
      params: Parameters, pairs `(name, parameter)` or groups; see `Optimizer`.
      lr: As for `Adam`.
      betas: As for `Adam`.
      eps: As for `Adam`.
      weight_decay: At least 0.
      amsgrad: As for `Adam`.
      maximize: Ascend instead of descend; the parameter decays as before.
      foreach: Has no effect, as for `Adam`.
      capturable: Has no effect, as for `Adam`.
      differentiable: Must be `False`, as for `Adam`.
      fused: Has no effect, as for `Adam`.

    Raises:
      ValueError: If an option is out of its range, or a parameter is sparse or complex.
      TypeError: If `params` is not an iterable of parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import AdamW, Parameter
      >>> weight = Parameter(jnp.ones((3, 2)))
      >>> optimizer = AdamW([weight], lr=0.1, weight_decay=0.5)
      >>> weight.grad = jnp.full((3, 2), 5.0)
      >>> optimizer.step()  # 1 - 0.1 * 0.5, and then by 0.1
      >>> round(float(weight.data[0, 0]), 4)
      0.85
    """

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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )

    def _check_options(self, index: int, saved: Group) -> None:
        super()._check_options(index, saved)
        # Older versions of torch's AdamW did not save this option.
        if not saved.get("decoupled_weight_decay", True) and saved.get("weight_decay"):
            raise ValueError(
                "loaded state dict has decoupled_weight_decay=False and weight_decay="
                f"{saved['weight_decay']} in group {index}: Adam's, where the decay is "
                "a part of the gradient. Load it into Adam, or set its "
                "decoupled_weight_decay to True to go on with AdamW's decay."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _refuse_differentiable(group: Group) -> None:
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True: a step overwrites its arrays, so JAX cannot "
            "differentiate it. Set it to False; or differentiate a functional step, of "
            "optax.adam or optax_sparse_adam.sparse_adam."
        )
