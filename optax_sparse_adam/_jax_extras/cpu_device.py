"""The CPU of the host, as one of JAX's devices."""

from typing import Any

import jax


def cpu_device() -> Any:
    """A CPU, or `None` where `jax_platforms` leaves it out (`JAX_PLATFORMS=cuda`).

    For small programs that need not wait for what an accelerator does. `None` is the
    default device for `jax.device_put` and `jax.default_device`: there they wait.
    """
    config: Any = jax.config  # not all of it has types in every version
    platforms = config.jax_platforms
    if platforms and "cpu" not in platforms.split(","):
        return None
    return jax.local_devices(backend="cpu")[0]
