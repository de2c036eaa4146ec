"""Arrays of one number, such as `jnp.zeros`, without a program for each shape.

Outside of programs JAX compiles one for each shape and type, some 15 ms of CPU: the core
had seven hundred. NumPy makes the same arrays.
"""

import jax
import numpy as np
from jax.extend.core import primitives


def fill_by_numpy():
    """Replaces what `jnp.zeros`, `jnp.ones` and `jnp.full` call outside of programs."""
    broadcast = primitives.broadcast_in_dim_p
    by_program = broadcast.impl

    def fill(x, *sizes, sharding, shape, broadcast_dimensions):
        is_plain = (
            isinstance(x, jax.Array)
            and x.ndim == 0
            and isinstance(x.dtype, np.dtype)
            and not (sizes or jax.typeof(x).weak_type or x.committed)
            and sharding is None
            and jax.sharding.get_abstract_mesh().empty
        )
        if is_plain:
            return jax.device_put(np.full(shape, x), may_alias=False)
        how = {"shape": shape, "broadcast_dimensions": broadcast_dimensions}
        return by_program(x, *sizes, **how, sharding=sharding)

    broadcast.def_impl(fill)
