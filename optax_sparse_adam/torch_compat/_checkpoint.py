"""Checkpoints: `state_dict` and `load_state_dict`, in the layout of `torch.optim`.

A state_dict is `{"state": {0: {"step": ..., ...}, ...}, "param_groups": [{"lr": ...,
"params": [0, ...]}, ...]}`: parameters are indices in the order of the groups, and a
group of named ones has `"param_names"`. Unlike in torch, options that the optimiser
does not have are refused: a checkpoint of another optimiser would be continued with
another formula.
"""

import copy
from collections import defaultdict
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._formulas import Group, learning_rate
from ._hooks import HookMixin
from ._parameter import Parameter, as_numpy, is_array

StateDict = dict[str, Any]

# What torch's learning-rate schedulers keep in a group beside the options.
_OF_SCHEDULERS = (
    *("initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("base_momentum", "max_momentum"),
)
# What torch writes beside them, which changes no result here.
_TORCH_ALONE = ("differentiable",)
# Those of the options that a checkpoint may lack, with a default that is right then.
_MAY_LACK = (
    *("foreach", "fused", "capturable", "differentiable", "maximize"),
    "decoupled_weight_decay",
)


class CheckpointMixin(HookMixin):
    """What an optimiser holds, and how it is saved and loaded."""

    defaults: dict[str, Any]
    param_groups: list[Group]
    state: defaultdict[Any, dict[str, Any]]

    def state_dict(self) -> StateDict:
        """The state in torch's layout, in Python scalars and NumPy arrays, as a copy.

        A learning rate that is a schedule is saved as its value for the next step.
        torch loads it once the arrays are tensors (bfloat16 by way of float32)::

          tensors = jax.tree.map(
              lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
              optimizer.state_dict(),
          )
        """
        self._run_hooks("save_pre")
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        # One that is listed twice has the index of its last place, as in torch.
        index: dict[Any, int] = {param: i for i, param in enumerate(params)}
        state = {index.get(key, key): _copied(x) for key, x in self.state.items()}
        groups = []
        for group in self.param_groups:
            packed = {key: _copied(x) for key, x in group.items() if key != "params"}
            if callable(group.get("lr")):
                states = (self.state.get(param, {}) for param in group["params"])
                steps = (int(state.get("step", 0)) for state in states)
                packed["lr"] = learning_rate(group, max(steps, default=0))
            groups.append(packed | {"params": [index[p] for p in group["params"]]})
        return self._run_hooks("save_post", {"state": state, "param_groups": groups})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores what `state_dict` of this class or of torch's returned.

        Parameters are matched by their positions in the groups, not by their names: for
        another order, change the dict in a hook, `register_load_state_dict_pre_hook`.
        Loaded names replace those of the groups, which else stay. Arrays may be of
        NumPy, JAX or torch; they are copied, in the type and, where the shapes are
        equal, to the devices of their parameter. Loaded options replace the groups',
        but a learning rate that is a schedule stays. An option of your own is loaded if
        the optimiser's group has it, too. To go on with this formula from the moments
        of another optimiser, load the state alone::

          groups = optimizer.state_dict()["param_groups"]
          optimizer.load_state_dict(saved | {"param_groups": groups})

        Raises:
          ValueError: If the groups differ from the optimiser's in their count or sizes,
            or have options that this optimiser does not have.
        """
        state_dict = self._run_hooks("load_pre", state_dict.copy())
        saved = state_dict["param_groups"]
        if len(self.param_groups) != len(saved):
            raise ValueError(
                "loaded state dict has a different number of parameter groups: "
                f"{len(saved)}, the optimizer has {len(self.param_groups)}"
            )
        params: dict[Any, Parameter] = {}
        groups = []
        for i, (group, new) in enumerate(zip(self.param_groups, saved, strict=True)):
            if len(group["params"]) != len(new["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match "
                    f"the size of optimizer's group: group {i} has {len(new['params'])}"
                    f" parameters, the optimizer's has {len(group['params'])}"
                )
            new = {k: x for k, x in new.items() if k in group or k not in _TORCH_ALONE}
            self._check_saved(i, new)
            params.update(zip(new["params"], group["params"], strict=True))
            new = _copied(new) | {"params": group["params"]}
            if callable(group.get("lr")) and not callable(new.get("lr")):
                new["lr"] = group["lr"]
            if "param_names" in group:
                new.setdefault("param_names", list(group["param_names"]))
            groups.append(new)
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for key, value in state_dict["state"].items():
            param = params.get(key)
            state[key if param is None else param] = _copied(value, param)
        # As after unpickling: adds missing options, and registers the arrays.
        self.__setstate__({"state": state, "param_groups": groups})
        self._run_hooks("load_post")

    def _check_saved(self, index: int, saved: Group) -> None:
        """Raises if a saved group has options that this optimiser does not have."""
        name, allowed = type(self).__name__, {*_OF_SCHEDULERS, "params", "param_names"}
        allowed.update(self.defaults, self.param_groups[index])
        strange = [f"{key}={saved[key]!r}" for key in saved if key not in allowed]
        missing = [x for x in self.defaults if x not in saved and x not in _MAY_LACK]
        wrong = {"has options that {} does not have": strange, "lacks options": missing}
        adams = not saved.get("decoupled_weight_decay", True) and saved["weight_decay"]
        if adams and self.defaults.get("decoupled_weight_decay"):
            wrong["decays otherwise than {}"] = ["decoupled_weight_decay=False"]
        for words, names in wrong.items():
            if names:
                raise ValueError(
                    f"loaded state dict {words.format(name)}, in group {index}: "
                    f"{', '.join(names)}. If another optimizer saved it, load it into "
                    "that optimizer's class, or load its state alone, with the groups "
                    f"of this {name}: see load_state_dict. If the option is your own, "
                    f"give group {index} of this {name} the same key first."
                )


def _copied(value: Any, param: Parameter | None = None, key: Any = None) -> Any:
    """A deep copy, with NumPy arrays; or, but for a `"step"`, arrays like `param`."""
    if isinstance(value, dict):
        return {key: _copied(x, param, key) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(x, param) for x in value)
    if not is_array(value):
        return copy.deepcopy(value)
    if param is None or key == "step":
        return np.array(as_numpy(value))
    with np.errstate(over="ignore"):  # infinite in a narrower type, as in torch
        array = np.array(as_numpy(value), param.dtype)
    if param.data.committed and array.shape == param.shape:
        return jax.device_put(array, param.data.sharding)
    return jnp.asarray(array)
