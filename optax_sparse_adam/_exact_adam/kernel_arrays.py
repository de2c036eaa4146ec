"""What brings stale rows up to date, as arrays that the kernel for CPUs takes."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax_extras.sharding import mesh_of
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


def stacked(*numbers: Any) -> jax.Array:
    """Numbers of each parameter side by side along a last axis."""
    columns = [x[..., None] for x in jnp.broadcast_arrays(*numbers)]
    if not mesh_of(*columns).explicit_axes:
        return jnp.concatenate(columns, axis=-1)
    # Under vmap JAX's concatenate raises where an Explicit axis splits the mapped one,
    # which some columns do not have. Test: `test_ensemble_over_an_explicit_axis`.
    last = len(columns) - 1

    def alone(place: int, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(place, last - place)])

    return functools.reduce(operator.add, map(alone, range(last + 1), columns))


def kernel_stale(
    rows: RowState, arrays: KernelArrays, constants: Constants
) -> native.Stale:
    of_all: Any = arrays[:4]
    return native.Stale(rows.arrays, constants.uses_roots, *of_all)
