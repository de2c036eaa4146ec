"""`SparseAdam`, `Adam`, `AdamW` and `Adafactor`, as in `torch.optim`.

Each class is a signature and tables; `Optimizer` has what they share, `_formulas` the
arithmetic. Differences from torch: a learning rate may be a schedule; `foreach`,
`fused` and `capturable` have no effect, because one compiled program always updates a
group; and `differentiable` is refused, because this program overwrites its arrays.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._optimizers.sparse_adam import ScaleBySparseAdamState
from .._rows.checks import is_bcoo
from ._formulas import ADAFACTOR, ADAM, MOMENTS, SPARSE_ADAM, Group
from ._optimizer import Optimizer, Params
from ._parameter import Parameter, own

_BETAS: dict[str, Any] = {
    "Invalid beta parameter at index 0: {betas[0]}": lambda x: 0 <= x.betas[0] < 1,
    "Invalid beta parameter at index 1: {betas[1]}": lambda x: 0 <= x.betas[1] < 1,
}
_DENSE = {"Sparse": "requires dense parameter tensors"}
_REAL = {"Complex": "does not support complex parameters"}


class SparseAdam(Optimizer):
    """Adam for row-sparse gradients: `torch.optim.SparseAdam` on JAX arrays.

    Its results are torch's, by the formula of `optax_sparse_adam.sparse_adam` (see
    there, also for `eps`). Only rows that the gradient holds change, in parameters and
    moments. Each parameter counts its own steps: those of an empty gradient, too, but
    not those in which the loss did not use it (see `step`).

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

    _formula = SPARSE_ADAM
    _options = ("lr", "betas", "eps", "maximize")
    _rules: ClassVar = {
        "Invalid learning rate: {lr}": lambda x: x.lr > 0,
        "Invalid epsilon value: {eps}": lambda x: x.eps > 0,
        **_BETAS,
    }
    _refused: ClassVar = _DENSE | _REAL

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
        # `locals()` holds the arguments by name; `Optimizer` takes those in `_options`.
        self.allow_dense = allow_dense
        super().__init__(params, locals())

    def _update(self, group: Group, params: list[Parameter]) -> None:
        if not (self.allow_dense or all(is_bcoo(p.grad) for p in params)):
            raise RuntimeError(
                "SparseAdam does not support dense gradients, please consider Adam "
                "instead. Or pass allow_dense=True: then all rows count as touched."
            )
        super()._update(group, params)

    def to_optax(self, tree: Any) -> ScaleBySparseAdamState:
        """A copy of the state, with which `optax_sparse_adam.sparse_adam` continues.

        `tree` is a tree of parameters, such as `{"users": users, "items": items}`, and
        becomes the structure of `mu` and `nu`. Raises `ValueError` if the parameters
        have made different numbers of steps: the functional state has one count.
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
        """Continues from a state of `optax_sparse_adam.sparse_adam` for this tree.

        The moments are copied, in the type of their parameter. The parameters' own
        arrays are for the caller to set.
        """

        def load(param: Parameter, mu: jax.Array, nu: jax.Array) -> None:
            moments = (own(moment).astype(param.dtype) for moment in (mu, nu))
            arrays = dict(zip(MOMENTS, moments, strict=True))
            self.state[param] = {"step": int(state.count), **arrays}

        jax.tree.map(load, tree, state.mu, state.nu)


class Adam(Optimizer):
    r"""Adam for dense gradients: `torch.optim.Adam` on JAX arrays.

    Its results are torch's. For a gradient :math:`g` of the parameter :math:`p`, to
    which :math:`\lambda p` has been added, at step :math:`t`, each parameter counting
    its own steps:

    .. math::

      m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
      v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
      p &\leftarrow p - \alpha \frac{m / (1 - \beta_1^t)}
        {\sqrt{v / (1 - \beta_2^t)} + \epsilon}

    With `amsgrad` the largest :math:`v` so far replaces :math:`v` in the last line.
    With `decoupled_weight_decay` the decay is not part of :math:`g`; instead :math:`p`
    is multiplied by :math:`1 - \alpha \lambda` first.

    `eps` is added to the *corrected* root, in `SparseAdam` to the uncorrected one: with
    the default `betas` the same `eps` acts 31.6 times as strongly there at the first
    step. A table with row-sparse gradients belongs in a `SparseAdam` beside this one.

    Args:
      params, lr, betas, maximize: As for `SparseAdam`; `lr` may be 0.
      eps: Added to the root of the corrected second moment; at least 0.
      weight_decay: :math:`\lambda`, at least 0.
      amsgrad: Divide by the largest second moment so far; one more array of state.
      foreach, capturable, fused: No effect.
      differentiable: Must be `False`.
      decoupled_weight_decay: Decay as in `AdamW`.

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

    _formula = ADAM
    _options = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach"),
        *("capturable", "differentiable", "fused", "decoupled_weight_decay"),
    )
    _rules: ClassVar = {
        "Invalid learning rate: {lr}": lambda x: x.lr >= 0,
        "Invalid epsilon value: {eps}": lambda x: x.eps >= 0,
        **_BETAS,
        "Invalid weight_decay value: {weight_decay}": lambda x: x.weight_decay >= 0,
    }
    _added_later: ClassVar = {
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "decoupled_weight_decay": False,
        "fused": None,
    }
    _refused: ClassVar = _DENSE | _REAL

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
        betas = tuple(betas)  # type: ignore[assignment]  # of any length until checked
        super().__init__(params, locals())
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")

    def _check_group(self, new: Group) -> None:
        super()._check_group(new)
        _refuse_differentiable(new)

    def _check_saved(self, index: int, saved: Group) -> None:
        super()._check_saved(index, saved)
        _refuse_differentiable(saved)
        if "amsgrad" not in saved:  # all other options of RAdam and Adamax are Adam's
            raise ValueError(
                f"loaded state dict has no option amsgrad in group {index}, so it is "
                f"not {type(self).__name__}'s: load it into the class of the optimizer "
                "that saved it. If that was an Adam older than the option, set amsgrad "
                "to False in the loaded group."
            )

    def _update(self, group: Group, params: list[Parameter]) -> None:
        # `value_and_grad` gives leaves that the loss does not use a BCOO with nothing
        # stored, where torch has None.
        used = [p for p in params if getattr(p.grad, "nse", 1)]
        if any(is_bcoo(p.grad) for p in used):
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam "
                "instead. Give it these parameters, and the others to Adam."
            )
        super()._update(group, used)


class AdamW(Adam):
    """Adam with decoupled weight decay: `torch.optim.AdamW` on JAX arrays.

    `Adam` with `decoupled_weight_decay=True`: each step multiplies the parameter by
    `1 - lr * weight_decay` and then makes Adam's step, whose moments do not see the
    decay. The arguments are those of `Adam`; `maximize` does not affect the decay.

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
        # All options but the last one, `decoupled_weight_decay`, are arguments here.
        given = locals()
        options = {name: given[name] for name in self._options[:-1]}
        super().__init__(params, **options, decoupled_weight_decay=True)

    def _check_saved(self, index: int, saved: Group) -> None:
        super()._check_saved(index, saved)
        # Older versions of torch's AdamW did not save this option.
        if not saved.get("decoupled_weight_decay", True) and saved.get("weight_decay"):
            raise ValueError(
                "loaded state dict has decoupled_weight_decay=False and weight_decay="
                f"{saved['weight_decay']} in group {index}: Adam's, where the decay is "
                "a part of the gradient. Load it into Adam, or set its "
                "decoupled_weight_decay to True to continue with AdamW's decay."
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
    _options = ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")
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
    _added_later: ClassVar = {"foreach": None}
    _refused: ClassVar = _DENSE

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
        super().__init__(params, locals())

    def _update(self, group: Group, params: list[Parameter]) -> None:
        if any(jnp.iscomplexobj(param.data) for param in params):
            raise RuntimeError("Adafactor does not support complex parameters")
        super()._update(group, params)
