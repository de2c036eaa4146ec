"""Hooks around a step, a save and a load, of one optimiser or of all, as in torch.

Two things differ. A hook may remove itself while it runs, and hooks run once where a
`step` calls that of its base class.
"""

import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Hook = Callable[..., Any]
Hooks = OrderedDict[int, Hook]
Step = TypeVar("Step", bound=Callable[..., Any])

_hooks_of_all: defaultdict[str, Hooks] = defaultdict(OrderedDict)  # by event


class RemovableHandle:
    """Removes a hook: with `remove()`, or at the end of a `with` block.

    Examples:
      >>> from optax_sparse_adam.torch_compat import register_optimizer_step_post_hook
      >>> with register_optimizer_step_post_hook(lambda *args: print("stepped")):
      ...     pass
    """

    _ids = itertools.count()

    def __init__(self, hooks: Hooks, hook: Hook, *, prepend: bool = False) -> None:
        self.id = next(self._ids)
        self._hooks = hooks
        hooks[self.id] = hook
        if prepend:
            hooks.move_to_end(self.id, last=False)

    def remove(self) -> None:
        """Removes the hook; a second call does nothing."""
        self._hooks.pop(self.id, None)

    def __enter__(self) -> "RemovableHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def register_optimizer_step_pre_hook(hook: Hook) -> RemovableHandle:
    """`Optimizer.register_step_pre_hook` for all optimisers, before their own hooks."""
    return RemovableHandle(_hooks_of_all["step_pre"], hook)


def register_optimizer_step_post_hook(hook: Hook) -> RemovableHandle:
    """`Optimizer.register_step_post_hook` for all optimisers, after their own hooks."""
    return RemovableHandle(_hooks_of_all["step_post"], hook)


def _with_step_hooks(step: Step) -> Step:
    """Wraps a `step` method so that it calls the hooks, once however it is nested."""

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        self: HookMixin = args[0]
        if self._stepping:  # called by the step of a subclass, whose hooks are running
            return step(*args, **kwargs)
        hooks, hooks_of_all = self._hooks, _hooks_of_all
        for hook in (*hooks_of_all["step_pre"].values(), *hooks["step_pre"].values()):
            result = hook(self, args, kwargs)
            if result is None:
                continue
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(
                    f"{step} must return None or a tuple of (new_args, new_kwargs), "
                    f"but got {result}, from {hook}."
                )
            args, kwargs = result
        self._stepping = True
        try:
            out = step(*args, **kwargs)
        finally:
            self._stepping = False
        for hook in (*hooks["step_post"].values(), *hooks_of_all["step_post"].values()):
            hook(self, args, kwargs)
        return out

    return hooked  # type: ignore[return-value]  # the same signature, by functools.wraps


class HookMixin:
    """The hooks of one optimiser, in the order of registration but for `prepend`."""

    _stepping = False

    def __init__(self) -> None:
        self._hooks: defaultdict[str, Hooks] = defaultdict(OrderedDict)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            setattr(cls, "step", _with_step_hooks(vars(cls)["step"]))  # noqa: B010

    def __getstate__(self) -> dict[str, Any]:
        # As in torch, a copied or unpickled optimiser starts without hooks.
        hidden = ("_hooks", "_stepping")
        return {name: x for name, x in vars(self).items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self).setdefault("_hooks", defaultdict(OrderedDict))

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` before each step.

        `args` start with the optimiser. The hook returns `None`, or other arguments
        `(new_args, new_kwargs)` for the step and the hooks after it.
        """
        return RemovableHandle(self._hooks["step_pre"], hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` after each step."""
        return RemovableHandle(self._hooks["step_post"], hook)

    def register_state_dict_pre_hook(
        self, hook: Hook, prepend: bool = False
    ) -> RemovableHandle:
        """Calls `hook(optimizer)` before `state_dict`."""
        return RemovableHandle(self._hooks["save_pre"], hook, prepend=prepend)

    def register_state_dict_post_hook(
        self, hook: Hook, prepend: bool = False
    ) -> RemovableHandle:
        """Calls `hook(optimizer, state_dict)`, which may return another dict."""
        return RemovableHandle(self._hooks["save_post"], hook, prepend=prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Hook, prepend: bool = False
    ) -> RemovableHandle:
        """Calls `hook(optimizer, copy)`, which may change or replace the copy."""
        return RemovableHandle(self._hooks["load_pre"], hook, prepend=prepend)

    def register_load_state_dict_post_hook(
        self, hook: Hook, prepend: bool = False
    ) -> RemovableHandle:
        """Calls `hook(optimizer)` after `load_state_dict`."""
        return RemovableHandle(self._hooks["load_post"], hook, prepend=prepend)

    def _run_hooks(self, event: str, *state_dict: Any) -> Any:
        """Calls the hooks of a save or a load; a dict goes from each to the next."""
        for hook in tuple(self._hooks[event].values()):
            result = hook(self, *state_dict)
            if state_dict and result is not None:
                state_dict = (result,)
        return state_dict[0] if state_dict else None
