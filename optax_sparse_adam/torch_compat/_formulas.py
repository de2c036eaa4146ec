"""The formulas of SparseAdam, Adam and Adafactor: one step of one table.

Each takes a table, its gradient and the scalars of the step, and returns the new table.
The scalars are computed on the host, in double precision: in float32 `1 - beta2**step`
cancels to 1e-4 of its size. They are arguments of the compiled program, so options may
change without a compilation. `sparse_adam` itself would take traced betas in float32,
so here its formula is called.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._jax_extras.cpu_device import cpu_device
from .._optimizers.hyperparameters import check_leaf
from .._optimizers.sparse_adafactor import SparseAdafactorState, sparse_adafactor
from .._optimizers.sparse_adam import AdamScalars, update_leaf_by_adam
from .._rows.apply_updates import apply_updates
from .._rows.entries import accumulator_dtype
from ._parameter import Gradient

# A parameter and the arrays of its state, by their keys.
Table = tuple[jax.Array, dict[str, jax.Array]]
Group = dict[str, Any]
Shape = tuple[int, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")  # in torch's state; mu and nu in optax's


class GroupFormula(NamedTuple):
    """How an optimiser updates the tables of a group.

    Attributes:
      update: `update(tables, grads, scalars)`, the new tables, in place.
      scalars: `scalars(group, dtype, step)`, those of a parameter's step, by name.
      shapes: `shapes(group, shape)`, of the arrays in a state.
      step_dtype: Type of the array `"step"` in a state; `None` for a Python integer.
    """

    update: Any
    scalars: Callable[[Group, Any, int], dict[str, float]]
    shapes: Callable[[Group, Shape], dict[str, Shape]]
    step_dtype: DTypeLike | None = "float32"


def scalar(option: Any) -> Any:
    """An option as a Python scalar; it may be an array with one element."""
    return option.item() if hasattr(option, "item") else option


def learning_rate(group: Group, count: int) -> Any:
    """The learning rate of a group after `count` steps, as a Python scalar."""
    lr = group["lr"]
    if not callable(lr):
        return scalar(lr)
    # On a CPU: on an accelerator it would wait for all steps that are queued there.
    with jax.default_device(cpu_device()):
        return float(lr(count))


def _compile(update_table: Callable[[Table, Gradient, Any], Table]) -> Any:
    """Compiles the update of one table into that of many, in place.

    The scalars are arrays with an element for each table.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def update_tables(
        tables: list[Table], grads: list[Any], scalars: dict[str, jax.Array]
    ) -> list[Table]:
        new = []
        for i, (table, grad) in enumerate(zip(tables, grads, strict=True)):
            check_leaf(grad, table[0])
            dtype = accumulator_dtype(grad.dtype, table[0].dtype)
            of_table = {name: x[i].astype(dtype) for name, x in scalars.items()}
            new.append(update_table(table, grad, SimpleNamespace(**of_table)))
        return new

    return update_tables


def _adam_scalars(group: Group, dtype: DTypeLike, step: int) -> dict[str, float]:
    """Those of `SparseAdam`, `Adam` and `AdamW`."""
    beta1, beta2 = map(scalar, group["betas"])
    lr, decay = learning_rate(group, step - 1), scalar(group.get("weight_decay", 0))
    is_decoupled = group.get("decoupled_weight_decay", False)
    # The formula divides the second moment by `root**2`; with numerator and denominator
    # multiplied by `root` no element needs that division.
    root, eps = math.sqrt(1.0 - beta2**step), scalar(group["eps"])
    return {
        "sign": -1.0 if group.get("maximize", False) else 1.0,
        # The parameter times `decay` is added to the gradient, or it shrinks to `keep`.
        "decay": 0.0 if is_decoupled else decay,
        "keep": 1.0 - lr * decay if is_decoupled else 1.0,
        "b1": beta1,
        "one_minus_b1": 1.0 - beta1,
        "b2": beta2,
        "one_minus_b2": 1.0 - beta2,
        "eps": eps,  # beside the uncorrected root of the second moment
        "corrected_eps": eps * root,  # as if beside the corrected one
        "scale": -lr * root / (1.0 - beta1**step),
    }


def _sparse_adam(table: Table, grad: Gradient, s: Any) -> Table:
    param, state = table
    adam_scalars = AdamScalars(*(getattr(s, name) for name in AdamScalars._fields))
    moments = tuple(state[key] for key in MOMENTS)
    update, moments = update_leaf_by_adam(grad, None, moments, adam_scalars)
    return apply_updates(param, update.change), dict(zip(MOMENTS, moments, strict=True))


def _adam(table: Table, grad: Any, s: Any) -> Table:
    # Not `optax.adam`, which computes `1 - b2**t` in float32. And `optax.amsgrad` takes
    # the maximum of the corrected second moments, torch that of the uncorrected ones.
    param, state = table
    dtype = s.scale.dtype
    wide_param, wide_grad = param.astype(dtype), s.sign * grad.astype(dtype)
    # torch leaves out a decay of 0, which would turn an infinite parameter into NaN.
    wide_grad += jnp.where(s.decay == 0, 0, s.decay * wide_param)

    new = {key: array.astype(dtype) for key, array in state.items()}
    new["exp_avg"] = s.b1 * new["exp_avg"] + s.one_minus_b1 * wide_grad
    new["exp_avg_sq"] = s.b2 * new["exp_avg_sq"] + s.one_minus_b2 * wide_grad**2
    second = new["exp_avg_sq"]
    if "max_exp_avg_sq" in new:
        second = new["max_exp_avg_sq"] = jnp.maximum(new["max_exp_avg_sq"], second)
    update = s.scale * new["exp_avg"] / (jnp.sqrt(second) + s.corrected_eps)

    state = {key: new[key].astype(array.dtype) for key, array in state.items()}
    return (s.keep * wide_param + update).astype(param.dtype), state


def _moments(group: Group, shape: Shape) -> dict[str, Shape]:
    keys = (*MOMENTS, "max_exp_avg_sq") if group.get("amsgrad") else MOMENTS
    return dict.fromkeys(keys, shape)


# The arrays of a factored second moment, and the axes that they average over.
_MEANS = {"row_var": -1, "col_var": -2}


def _adafactor(table: Table, grad: Any, s: Any) -> Table:
    param, state = table
    tx = sparse_adafactor(s.lr, s.beta2_decay, (s.eps1, s.eps2), s.d, s.weight_decay)
    v_row, v_col = (
        state[key].squeeze(axis) if key in state else None
        for key, axis in _MEANS.items()
    )
    count = s.count.astype(jnp.int32)
    old = SparseAdafactorState(count, v_row, v_col, state.get("variance"))
    delta, new = tx.update(s.sign.astype(grad.dtype) * grad, old, param)
    moments = {"row_var": new.v_row, "col_var": new.v_col, "variance": new.v}
    state = {key: moments[key].reshape(array.shape) for key, array in state.items()}
    return apply_updates(param, delta), state


def _adafactor_scalars(group: Group, dtype: DTypeLike, step: int) -> dict[str, float]:
    eps1, eps2 = group["eps"]
    return {
        "sign": -1.0 if group["maximize"] else 1.0,
        "count": step - 1,
        "lr": learning_rate(group, step - 1),
        "eps1": float(jnp.finfo(dtype).eps) if eps1 is None else scalar(eps1),
        "eps2": scalar(eps2),
        **{key: scalar(group[key]) for key in ("beta2_decay", "d", "weight_decay")},
    }


def _adafactor_shapes(group: Group, shape: Shape) -> dict[str, Shape]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


SPARSE_ADAM = GroupFormula(_compile(_sparse_adam), _adam_scalars, _moments, None)
ADAM = GroupFormula(_compile(_adam), _adam_scalars, _moments)
ADAFACTOR = GroupFormula(_compile(_adafactor), _adafactor_scalars, _adafactor_shapes)
