"""One function with two implementations, one of them for CPUs."""

from collections.abc import Callable
from typing import Any

from .._jax_extras.by_platform import by_platform
from . import _calls, _library


def only_platform() -> str | None:
    """The one platform that this process compiles for, if that is known.

    Half of a step's tracing is that of other platforms. A process that uses the kernel
    and has CPUs only leaves it out, where nothing asks for it: its programs compile for
    no other platform, as a call of the kernel in them says. With
    `OPTAX_SPARSE_ADAM_NATIVE=0` they do.
    """
    return "cpu" if _calls.available() and _library.has_cpus_only() else None


def on_cpu(special: Callable[..., Any], default: Callable[..., Any], *args: Any) -> Any:
    """`special(*args)` on a CPU, else `default(*args)`; see `by_platform`.

    For lookups. What updates rows is chosen at once, by `_rows.with_ops`.
    """
    both = {"cpu": (special, default)}
    return by_platform(both, default, *args, only=only_platform())
