"""What brings stale rows up to date, as arrays that the kernel for CPUs takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..native import _calls as native
from .remaining_update import Constants
from .rows import RowState, TableState, cast_floats, coefficients_of, decay_in


class KernelArrays(NamedTuple):
    """What the kernel takes besides rows, of all parameters; see `native.Stale`.

    `step` are `native.StepScalars`, `[parameters, 9]`; `None` if rows are only read.
    """

    scalars: jax.Array
    polynomials: jax.Array
    steps: jax.Array
    place: jax.Array | None = None
    step: jax.Array | None = None

    def at(self, place: int) -> "KernelArrays":
        return self._replace(place=jnp.asarray(place, jnp.int32))


def stale_arrays(table: TableState, constants: Constants) -> KernelArrays:
    """What brings rows up to date, for the kernel.

    Of all parameters at once, because XLA compiles every operation on a few numbers
    apart.
    """
    single = cast_floats(constants, jnp.float32)
    polynomials, (behind, ahead) = coefficients_of(table, constants, jnp.float32)
    decay = decay_in(table, jnp.float32)
    logs = single.log_b1, single.log_q
    scalars = native.StaleScalars(*logs, behind, ahead, *decay)
    steps = stacked(table.clock, table.values_until)
    return KernelArrays(stacked(*scalars), polynomials, steps)


def stacked(*columns: Any) -> jax.Array:
    """Numbers of each parameter side by side along a last axis."""
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)


def kernel_stale(
    rows: RowState, arrays: KernelArrays, constants: Constants
) -> native.Stale:
    of_all: Any = arrays[:4]
    return native.Stale(rows.arrays, constants.uses_roots, *of_all)
