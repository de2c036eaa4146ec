"""state_dict and load_state_dict: the state of an optimiser as plain data, and back."""

import copy
from collections import defaultdict
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._hooks import HookMixin
from ._parameter import Parameter, as_numpy, is_array

StateDict = dict[str, Any]

# What torch's learning-rate schedulers keep in a group beside the options.
_OF_SCHEDULERS = (
    *("initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("base_momentum", "max_momentum"),
)


class CheckpointMixin(HookMixin):
    """An optimiser's way in and out of a dict, in the layout of torch."""

    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, dict[str, Any]]

    def state_dict(self) -> StateDict:
        """The state as plain data: numbers and NumPy arrays, copies all.

        The layout is that of torch, to the key:
        `{"state": {0: {"step": ..., ...}, ...}, "param_groups": [{"lr": ..., "params":
        [0, ...]}, ...]}`, where parameters are indices in the order of the groups.
        torch loads it once the arrays are tensors::

          tensors = jax.tree.map(
              lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
              optimizer.state_dict(),
          )

        (bfloat16, of which NumPy and torch have different ideas, with
        `torch.from_numpy(x.astype(np.float32))`: torch casts it back when it loads.)

        A learning rate that is a schedule is saved as its value for the next step: the
        schedule belongs to the program, its place in it is `"step"`.

        Returns:
          A dict that no later step changes.

        Examples:
          >>> import jax.numpy as jnp
          >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
          >>> optimizer = SparseAdam([Parameter(jnp.zeros((3, 2)))], lr=0.1, eps=0.5)
          >>> saved = optimizer.state_dict()
          >>> saved["param_groups"][0]["lr"], saved["param_groups"][0]["params"]
          (0.1, [0])
          >>> optimizer.load_state_dict(saved)
        """
        self._call_hooks("save pre")
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        # A parameter that is listed twice has the index of its last place: torch's.
        index: dict[Any, int] = {param: i for i, param in enumerate(params)}
        state = {index.get(key, key): _plain(x) for key, x in self.state.items()}
        groups = [self._pack(group, index) for group in self.param_groups]
        return self._filter_by_hooks(
            "save post", {"state": state, "param_groups": groups}
        )

    def _pack(self, group: dict[str, Any], index: dict[Any, int]) -> dict[str, Any]:
        packed = {key: _plain(x) for key, x in group.items() if key != "params"}
        if callable(group.get("lr")):
            states = [self.state.get(param, {}) for param in group["params"]]
            steps = [int(state.get("step", 0)) for state in states]
            packed["lr"] = schedule_value(group["lr"], max(steps, default=0))
        packed["params"] = [index[param] for param in group["params"]]
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores a state that `state_dict` of this class or of torch's returned.

        Parameters are matched by their place in the groups, not by their names. Arrays
        may be of NumPy, JAX or torch and of any floating-point type; they are copied to
        the type, and, where the shapes agree, to the devices of their parameter. The
        options of the groups are replaced by the loaded ones, all of them; only a
        learning rate that is a schedule stays where a number is loaded.

        torch loads what another optimiser saved and ignores the options that it does
        not have; this raises. An option of your own is fine if the optimiser's group
        has it, too. To go on with this optimiser's formula from another's moments (a
        table trained by Adam as a dense one, and from now on by SparseAdam), load the
        state alone::

          groups = optimizer.state_dict()["param_groups"]
          optimizer.load_state_dict(saved | {"param_groups": groups})

        Args:
          state_dict: The dict, which is left as it is.

        Raises:
          ValueError: If the groups differ in number or size from the optimiser's, or
            have options that this optimiser does not have.
        """
        state_dict = self._filter_by_hooks("load pre", state_dict.copy())
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
                    f"the size of optimizer's group: group {i} has "
                    f"{len(new['params'])} parameters, the optimizer's has "
                    f"{len(group['params'])}"
                )
            if new.get("differentiable") is False and "differentiable" not in group:
                # torch adds it to the groups of every optimiser that has loaded a dict.
                new = {k: value for k, value in new.items() if k != "differentiable"}
            self._check_options(i, new)
            params.update(zip(new["params"], group["params"], strict=True))
            groups.append(_unpack(new, group))
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for key, value in state_dict["state"].items():
            if key in params:
                state[params[key]] = _like(params[key], value)
            else:
                state[key] = _plain(value)
        self.__setstate__({"state": state, "param_groups": groups})
        self._call_hooks("load post")

    def _check_options(self, index: int, saved: dict[str, Any]) -> None:
        """Raises if a saved group has options of which this optimiser knows nothing."""
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


def schedule_value(schedule: Any, count: int) -> float:
    """The value of a schedule after `count` steps."""
    # On a CPU, so that to read it does not wait for all that an accelerator has to do.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return float(schedule(count))


def _plain(value: Any) -> Any:
    """A deep copy, with NumPy arrays for all arrays."""
    if is_array(value):
        return np.array(as_numpy(value))
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return copy.deepcopy(value)


def _unpack(saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The saved options for this group's parameters."""
    new = {key: _plain(x) for key, x in saved.items()}
    new["params"] = group["params"]
    if "param_names" in group:
        new.setdefault("param_names", group["param_names"])
    if callable(group.get("lr")) and not callable(new.get("lr")):
        new["lr"] = group["lr"]
    return new


def _like(param: Parameter, value: Any, key: Any = None) -> Any:
    """A deep copy, with arrays in the type and on the devices of their parameter."""
    if isinstance(value, dict):
        return {key: _like(param, x, key) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_like(param, x) for x in value)
    if key == "step" or not is_array(value):
        return _plain(value)
    with np.errstate(over="ignore"):  # infinite in a narrower type, as in torch
        array = np.array(as_numpy(value), param.dtype)
    if param.data.committed and array.shape == param.shape:
        return jax.device_put(array, param.data.sharding)
    return jnp.asarray(array)
