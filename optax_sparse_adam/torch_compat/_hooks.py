"""Hooks: functions that are called before and after a step, a save and a load."""

import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

Hooks = OrderedDict[int, Callable[..., Any]]
Step = TypeVar("Step", bound=Callable[..., Any])

_step_pre_hooks: Hooks = OrderedDict()
_step_post_hooks: Hooks = OrderedDict()


class RemovableHandle:
    """Removes a hook: with `remove()`, or at the end of a `with` block.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import Parameter, SparseAdam
      >>> optimizer = SparseAdam([Parameter(jnp.zeros(3))])
      >>> hook = lambda optimizer, args, kwargs: print("stepped")
      >>> with optimizer.register_step_post_hook(hook):
      ...     optimizer.step()
      stepped
      >>> optimizer.step()
    """

    _ids = itertools.count()

    def __init__(
        self, hooks: Hooks, hook: Callable[..., Any], *, prepend: bool = False
    ) -> None:
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


def register_optimizer_step_pre_hook(hook: Callable[..., Any]) -> RemovableHandle:
    """Registers a hook that runs before every step of every optimiser.

    Args:
      hook: As for `Optimizer.register_step_pre_hook`, whose hooks run after this one.

    Returns:
      A handle that removes the hook.
    """
    return RemovableHandle(_step_pre_hooks, hook)


def register_optimizer_step_post_hook(hook: Callable[..., Any]) -> RemovableHandle:
    """Registers a hook that runs after every step of every optimiser.

    Args:
      hook: As for `Optimizer.register_step_post_hook`, whose hooks run before this one.

    Returns:
      A handle that removes the hook.
    """
    return RemovableHandle(_step_post_hooks, hook)


def with_step_hooks(step: Step) -> Step:
    """Wraps a `step` method so that it calls the hooks, once however it is nested."""

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        self: HookMixin = args[0]
        if self._stepping:  # called by the step of a subclass, whose hooks are running
            return step(*args, **kwargs)
        for hook in (*_step_pre_hooks.values(), *self._hooks["step pre"].values()):
            result = hook(self, args, kwargs)
            if result is None:
                continue
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(
                    f"{step} must return None or a tuple of (new_args, new_kwargs), "
                    f"but got {result}. A step pre-hook returned that: {hook}."
                )
            args, kwargs = result
        self._stepping = True
        try:
            out = step(*args, **kwargs)
        finally:
            self._stepping = False
        for hook in (*self._hooks["step post"].values(), *_step_post_hooks.values()):
            hook(self, args, kwargs)
        return out

    return hooked  # type: ignore[return-value]  # the same signature, by functools.wraps


class HookMixin:
    """The hooks of one optimiser: what `Optimizer` inherits."""

    _stepping = False

    def __init__(self) -> None:
        self._hooks: defaultdict[str, Hooks] = defaultdict(OrderedDict)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            setattr(cls, "step", with_step_hooks(vars(cls)["step"]))  # noqa: B010

    def __getstate__(self) -> dict[str, Any]:
        # As in torch, a copied or unpickled optimiser starts without hooks.
        hidden = ("_hooks", "_stepping")
        return {name: x for name, x in vars(self).items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self).setdefault("_hooks", defaultdict(OrderedDict))

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that runs before each step.

        Args:
          hook: `hook(optimizer, args, kwargs) -> None or (new_args, new_kwargs)`, where
            `args` are those of `step` and start with the optimiser itself.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["step pre"], hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that runs after each step.

        Args:
          hook: `hook(optimizer, args, kwargs) -> None`, with the arguments that the
            step was called with in the end.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["step post"], hook)

    def register_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Registers a hook that runs before `state_dict`.

        Args:
          hook: `hook(optimizer) -> None`.
          prepend: Run it before the hooks that are registered already, not after them.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["save pre"], hook, prepend=prepend)

    def register_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Registers a hook that runs after `state_dict`.

        Args:
          hook: `hook(optimizer, state_dict) -> None or another state_dict`; it may
            change the one that it gets.
          prepend: Run it before the hooks that are registered already, not after them.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["save post"], hook, prepend=prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Registers a hook that runs before `load_state_dict`.

        Args:
          hook: `hook(optimizer, state_dict) -> None or another state_dict`; it gets a
            shallow copy, which it may change.
          prepend: Run it before the hooks that are registered already, not after them.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["load pre"], hook, prepend=prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Registers a hook that runs after `load_state_dict`.

        Args:
          hook: `hook(optimizer) -> None`.
          prepend: Run it before the hooks that are registered already, not after them.

        Returns:
          A handle that removes the hook.
        """
        return RemovableHandle(self._hooks["load post"], hook, prepend=prepend)

    def _filter_by_hooks(self, kind: str, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state_dict as the hooks of this kind leave it."""
        for hook in tuple(self._hooks[kind].values()):
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def _call_hooks(self, kind: str) -> None:
        for hook in tuple(self._hooks[kind].values()):
            hook(self)
