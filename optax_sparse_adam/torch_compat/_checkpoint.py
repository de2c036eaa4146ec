"""state_dict and load_state_dict: the state of an optimiser as plain data, and back."""

import copy
from collections import defaultdict
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._hooks import Hooked
from ._parameter import Parameter, as_numpy, is_array

StateDict = dict[str, Any]


class Checkpointed(Hooked):
    """An optimiser's way in and out of a dict, in the layout of torch."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, dict[str, Any]]

    def state_dict(self) -> StateDict:
        """The state as plain data: numbers and NumPy arrays, copies all.

        The layout is that of torch, to the key:
        `{"state": {0: {"step": ..., ...}, ...}, "param_groups": [{"lr": ..., "params":
        [0, ...]}, ...]}`, where parameters are numbered in the order of the groups.
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
        self._announce("save pre")
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        # A parameter that is listed twice has the number of its last place: torch's.
        numbers: dict[Any, int] = {param: i for i, param in enumerate(params)}
        state = {numbers.get(key, key): _plain(x) for key, x in self.state.items()}
        groups = [self._pack(group, numbers) for group in self.param_groups]
        return self._pass_through("save post", {"state": state, "param_groups": groups})

    def _pack(self, group: dict[str, Any], numbers: dict[Any, int]) -> dict[str, Any]:
        packed = {key: _plain(x) for key, x in group.items() if key != "params"}
        if callable(group.get("lr")):
            states = [self.state.get(param, {}) for param in group["params"]]
            steps = [int(state.get("step", 0)) for state in states]
            packed["lr"] = scheduled(group["lr"], max(steps, default=0))
        packed["params"] = [numbers[param] for param in group["params"]]
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores a state that `state_dict` of this class or of torch's returned.

        Parameters are matched by their place in the groups, not by their names. Arrays
        may be of NumPy, JAX or torch and of any floating-point type; they are copied to
        the type, and, where the shapes agree, to the devices of their parameter. The
        options of the groups are replaced by the loaded ones, all of them; only a
        learning rate that is a schedule stays where a number is loaded.

        Args:
          state_dict: The dict, which is left as it is.

        Raises:
          ValueError: If the groups differ in number or size from the optimiser's.
        """
        state_dict = self._pass_through("load pre", state_dict.copy())
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
            params.update(zip(new["params"], group["params"], strict=True))
            groups.append(_unpack(new, group))
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for key, value in state_dict["state"].items():
            if key in params:
                state[params[key]] = _like(params[key], value)
            else:
                state[key] = _plain(value)
        self.__setstate__({"state": state, "param_groups": groups})
        self._announce("load post")


def scheduled(schedule: Any, count: int) -> float:
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
