"""`Optimizer`: the base class, with parameter groups, options and the compiled step.

An optimiser of this package is a subclass with a formula and tables of its options. A
step is called outside of `jit`, and is not differentiable.
"""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .._rows.canary import CanaryBCOO
from .._rows.checks import is_bcoo
from ._checkpoint import CheckpointMixin
from ._formulas import Group, GroupFormula, Shape, scalar
from ._parameter import Parameter, register_overwritten

Params = Iterable[Parameter] | Iterable[tuple[str, Parameter]] | Iterable[Group]


class Optimizer(CheckpointMixin):
    """Base of the optimisers: what is common to all of them in `torch.optim`.

    A new optimiser overrides `step`, as in torch.

    Args:
      params: Parameters, pairs `(name, parameter)`, or dicts with the key `"params"`
        (one of these two, or a single parameter) and any options of the group's own.
        Generators are fine, sets are not. Names are kept in the group, as
        `"param_names"`, and saved with it.
      defaults: The options of groups that do not give their own; an attribute, too.

    Attributes:
      param_groups: The groups, each a dict of options and a list `"params"`. Options
        may be changed between steps; nothing is compiled again.
      state: For each parameter, from its first step on, a dict of arrays. Like
        `Parameter.data`, they live until the next step.

    Raises:
      TypeError: If `params` is not an iterable of these.
      ValueError: If an option is out of its range, a parameter is of a kind that the
        optimiser refuses, or is in two groups, only some have names, or there are none.
        (Twice in one group is a warning: a step updates it twice.)
    """

    # What makes an optimiser of this package:
    #   _formula  what a step computes; `None`: the class has a `step` of its own
    #   _rules    what must hold, by the words of the error
    _formula: ClassVar[GroupFormula | None] = None
    _rules: ClassVar[dict[str, Callable[[Any], bool]]] = {}

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        super().__init__()
        self.defaults = defaults
        if self._rules:
            scalars = {name: _scalar(name, x) for name, x in self.defaults.items()}
            for words, holds in self._rules.items():
                if not holds(SimpleNamespace(**scalars)):
                    raise ValueError(words.format(**scalars))
        if isinstance(params, (Parameter, jax.Array, np.ndarray, BCOO)):
            raise TypeError(
                "params argument given to the optimizer should be an iterable of "
                f"Tensors or dicts, but got {_typename(params)}. Give a list."
            )
        self.state = defaultdict(dict)
        self.param_groups = []
        groups: list[Any] = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, a dict as the constructor takes, with the default options."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError(
                "optimizer parameters need to be organized in ordered collections, "
                "but the ordering of tensors in sets will change between runs. "
                "Please use a list instead."
            )
        named_params = [params] if isinstance(params, Parameter) else list(params)
        names = [p[0] for p in named_params if isinstance(p, tuple)]
        params = [p[1] if isinstance(p, tuple) else p for p in named_params]
        if names and len(names) < len(params):
            raise ValueError(
                "all optimizer params should be with/without names. Some param names "
                "are missing"
            )
        for param in params:
            if not isinstance(param, Parameter):
                raise TypeError(
                    "optimizer can only optimize Tensors, but one of the params is "
                    f"{_typename(param)}. Give arrays as Parameters, dict.values(), or "
                    "dict.items() for their names."
                )
        if self._formula:
            self._refuse_kinds(params)
        if len(set(params)) < len(params):
            warnings.warn(
                "optimizer contains a parameter group with duplicate parameters; in "
                "future, this will cause an error; see "
                "github.com/pytorch/pytorch/issues/40967 for more information",
                stacklevel=4,  # the line that makes a SparseAdam
            )
        if names:
            param_group["param_names"] = names
        named = "param_names" in param_group
        if any(("param_names" in group) != named for group in self.param_groups):
            raise ValueError(
                "all optimizer param groups should be with/without names. cannot add "
                f"param group {'with' if named else 'without'} names to the optimizer"
            )
        if not set(params).isdisjoint(self._params()):
            raise ValueError("some parameters appear in more than one parameter group")
        param_group["params"] = params
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        self.param_groups.append(param_group)

    def _refuse_kinds(self, params: list[Parameter]) -> None:
        """Raises for parameters of a new group that are sparse or complex."""
        kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
            "Sparse": (is_bcoo, "requires dense parameter tensors"),
            "Complex": (jnp.iscomplexobj, "does not support complex parameters"),
        }
        for kind, (is_kind, rule) in kinds.items():
            places = [i for i, param in enumerate(params) if is_kind(param.data)]
            if places:
                indices = [[len(self.param_groups), i] for i in places]
                raise ValueError(
                    f"{kind} params at indices {indices}: {type(self).__name__} {rule}"
                )

    def _params(self) -> Iterator[Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient, in place.

        A parameter without a gradient stays as it is, and its steps are not counted; so
        does one that the loss did not use, for which `value_and_grad` has a gradient
        with nothing stored. It has the same one of a batch without ids, a step that
        torch counts; an empty gradient that is made otherwise is counted here, too:
        `BCOO((grad.data, grad.indices), shape=grad.shape)`. `closure` is called first,
        to compute the loss, which is returned, and to set the gradients.
        """
        loss = None if closure is None else closure()
        for group in self.param_groups:
            # One program runs on one set of devices, and overwrites an array once: of
            # [a, b, a] on one device there are two calls, with [a, b] and with [a].
            calls: defaultdict[Any, list[Parameter]] = defaultdict(list)
            times: Counter[Parameter] = Counter()
            for param in filter(_is_used, group["params"]):
                calls[times[param], frozenset(param.data.devices())].append(param)
                times[param] += 1
            for params in calls.values():
                self._update(group, params)
        return loss

    def _update(self, group: Group, params: list[Parameter]) -> None:
        """Updates these parameters, which have gradients."""
        formula = self._formula
        if formula is None:
            raise NotImplementedError("an Optimizer of your own overrides step")
        tables, steps = [], []
        for param in params:
            shapes = formula.shapes(group, param.shape)
            state = self.state[param] or self._init_state(param, shapes)
            arrays = {key: state[key] for key in shapes if key in state}
            held = {key: jnp.shape(array) for key, array in arrays.items()}
            if held != shapes:  # of a state_dict of other parameters or options
                raise ValueError(
                    f"The state of a parameter of shape {param.shape} must have arrays "
                    f"of the shapes {shapes}, got {held}. Load the state_dict of an "
                    "optimizer of this kind, these parameters and these options, or "
                    "delete the parameter from `optimizer.state` to start from zeros."
                )
            tables.append((param.data, arrays))
            steps.append(int(state["step"]) + 1)
        pairs = zip(params, steps, strict=True)
        by_table = [formula.scalars(group, p.dtype, step) for p, step in pairs]
        scalars = {
            key: np.array([x[key] for x in by_table], float) for key in by_table[0]
        }
        # No array has changed so far, nor does one if the program cannot be compiled.
        tables = formula.update(tables, [p.grad for p in params], scalars)
        if any(isinstance(data, jax.core.Tracer) for data, _ in tables):
            raise RuntimeError(
                "step was called inside of jit, but it changes the optimizer, which "
                "lives outside. Call it outside of jit; it is compiled by itself."
            )
        for param, step, (data, arrays) in zip(params, steps, tables, strict=True):
            param.adopt(data)
            ordered = {key: arrays[key] for key in formula.shapes(group, param.shape)}
            self.state[param].update({"step": self._as_step(step), **ordered})
            jax.tree.map(register_overwritten, arrays)

    def _init_state(self, param: Parameter, shapes: dict[str, Shape]) -> dict[str, Any]:
        like = param.data
        arrays = {k: jnp.zeros_like(like, shape=shape) for k, shape in shapes.items()}
        return {"step": self._as_step(0), **arrays}

    def _as_step(self, step: Any) -> Any:
        dtype = self._formula and self._formula.step_dtype
        return np.array(step, dtype) if dtype else step

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for param in self._params():
            saved = self.state.get(param, {})
            if "step" in saved:  # a scalar or an array: versions of torch differ
                saved["step"] = self._as_step(saved["step"])
            for array in jax.tree.leaves(saved):
                if isinstance(array, jax.Array):
                    register_overwritten(array)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters, to `None` or to zeros.

        A row-sparse gradient of zeros is empty: a step counts but changes nothing.
        """
        for param in self._params():
            grad = None if set_to_none else param.grad
            if isinstance(grad, BCOO):
                empty = grad.data[:0], grad.indices[:0]
                param.grad = BCOO(empty, shape=grad.shape)
            else:
                param.grad = None if grad is None else jnp.zeros_like(grad)

    def __repr__(self) -> str:
        text = f"{type(self).__name__} ("
        for i, group in enumerate(self.param_groups):
            text += f"\nParameter Group {i}\n"
            for key in sorted(key for key in group if key != "params"):
                text += f"    {key}: {group[key]}\n"
        return text + ")"


def _scalar(name: str, option: Any) -> Any:
    """An option as Python scalars, for its checks: a schedule is any learning rate."""
    if isinstance(option, (tuple, list)):
        return type(option)(_scalar(name, entry) for entry in option)
    if name == "lr" and callable(option):
        return math.inf
    shape = tuple(getattr(option, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got shape {shape}")
    return scalar(option)


def _is_used(param: Parameter) -> bool:
    grad = param.grad
    # `value_and_grad` makes a BCOO with nothing stored where torch has None, and of a
    # batch without ids the same. An empty one that somebody else made, such as torch's,
    # is a step without rows, as in torch.
    return grad is not None and not (isinstance(grad, CanaryBCOO) and not grad.nse)


def _typename(value: Any) -> str:
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return module + cls.__qualname__
