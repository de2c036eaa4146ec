"""Whether the kernel for GPUs is wanted; imports nothing of it."""

import os

from . import _build, _library

IS_DEFAULT = True  # where nobody says: benchmarks/gpu.json is of a GPU that ran it


def switched_on() -> bool:
    """Whether the user, or the default, wants the kernel."""
    value = os.environ.get("OPTAX_SPARSE_ADAM_GPU_KERNEL", "").strip().lower()
    return IS_DEFAULT if not value else value not in ("0", "false", "off", "no")


def wanted() -> bool:
    """Whether there may be a kernel: the rest costs imports, and asks for devices."""
    return switched_on() and not _build.switched_off() and not _library.has_cpus_only()


def gpu_status() -> str:
    """In words, whether GPUs use the kernel, and if not, why.

    Where they use it, also what was traced for it, and what for XLA and why. It is off
    with `OPTAX_SPARSE_ADAM_GPU_KERNEL=0` in the environment.
    """
    name = "The kernel for GPUs is not used: "
    if not switched_on():
        return f"{name}OPTAX_SPARSE_ADAM_GPU_KERNEL=1 turns it on."
    if _build.switched_off():
        return f"{name}OPTAX_SPARSE_ADAM_NATIVE turns it off."
    if _library.has_cpus_only():
        return f"{name}JAX has CPUs only here."
    from . import _cuda

    reason = _cuda.reason()
    return _cuda.status() if reason is None else name + reason
