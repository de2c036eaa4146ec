"""Checkpoints: `state_dict` and `load_state_dict`, in the layout of `torch.optim`.

A state_dict is `{"state": {0: {"step": ..., ...}, ...}, "param_groups": [{"lr": ...,
"params": [0, ...]}, ...]}`: parameters are indices in the order of the groups. Unlike
in torch, options that the optimiser does not have are refused: a checkpoint of another
optimiser would be continued with another formula.
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


class CheckpointMixin(HookMixin):
    """What an optimiser holds, and how it is saved and loaded."""

    defaults: dict[str, Any]
    param_groups: list[Group]
    state: defaultdict[Any, dict[str, Any]]

    def state_dict(self) -> StateDict:
        """The state in torch's layout, in Python scalars and NumPy arrays.

        torch loads it once the arrays are tensors::

          tensors = jax.tree.map(
              lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
              optimizer.state_dict(),
          )

        (bfloat16 with `torch.from_numpy(x.astype(np.float32))`: torch casts it back
        when it loads.) No later step changes the dict. A learning rate that is a
        schedule is saved as its value for the next step.

        Examples:
          >>> import jax.numpy as jnp
          >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
          >>> optimizer = SparseAdam([Parameter(jnp.zeros((3, 2)))], lr=0.1, eps=0.5)
          >>> saved = optimizer.state_dict()
          >>> saved["param_groups"][0]["lr"], saved["param_groups"][0]["params"]
          (0.1, [0])
          >>> optimizer.load_state_dict(saved)
        """
        self._run_hooks("save_pre")
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        # A parameter that is listed twice has the index of its last place, as in torch.
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

        Parameters are matched by their positions in the groups, not by their names.
        Arrays may be of NumPy, JAX or torch and of any floating-point type; they are
        copied, in the type and, where the shapes are equal, to the devices of their
        parameter. The loaded options replace those of the groups, but a learning rate
        that is a schedule stays. An option of your own is loaded if the optimiser's
        group has it, too. To continue with this optimiser's formula from the moments of
        another (a table trained by Adam, and from now on by SparseAdam), load the state
        alone::

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
            if new.get("differentiable") is False and "differentiable" not in group:
                # torch adds it to the groups of every optimiser that has loaded a dict.
                new = {k: value for k, value in new.items() if k != "differentiable"}
            self._check_saved(i, new)
            params.update(zip(new["params"], group["params"], strict=True))
            new = _copied(new) | {"params": group["params"]}
            if "param_names" in group:
                new.setdefault("param_names", group["param_names"])
            if callable(group.get("lr")) and not callable(new.get("lr")):
                new["lr"] = group["lr"]
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
        known = {"param_names", *_OF_SCHEDULERS}
        known.update(self.defaults, self.param_groups[index])
        unknown = [f"{key}={saved[key]!r}" for key in saved if key not in known]
        if unknown:
            name = type(self).__name__
            raise ValueError(
                f"loaded state dict has options that {name} does not have, in group "
                f"{index}: {', '.join(unknown)}. If another optimizer saved it, load "
                "it into that optimizer's class, or load its state alone, with the "
                f"groups of this {name}: see load_state_dict. If the option is your "
                f"own, give group {index} of this {name} the same key first."
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
