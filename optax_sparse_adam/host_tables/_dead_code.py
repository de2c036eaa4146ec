"""Which arguments a program reads, when what nobody asks for is left out of it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._gradients.tracing import jit_enabled
from .._jax_extras.jaxprs import name_and_params
from ._callbacks import without_callbacks
from ._residuals import equations_in


def without_dead_code(closed: ClosedJaxpr, args: Sequence[Any]) -> jax.export.Exported:
    """The program as JAX compiles it, for whoever looks at its text and arguments."""
    # What has callbacks, or is partitioned by one, cannot be exported.
    names = "pure_callback", "io_callback", "debug_callback", "custom_partitioning"
    with jit_enabled():
        program = ClosedJaxpr(without_callbacks(closed.jaxpr, names), closed.consts)
        fun = jax.jit(jaxpr_as_fun(program))
        # Nobody loads it: kernels, of ours or of the user's, need no guarantees.
        targets = {
            params["target_name"]
            for name, params in map(name_and_params, equations_in(program.jaxpr.eqns))
            if name == "ffi_call"
        }
        allowed = [*map(jax.export.DisabledSafetyCheck.custom_call, sorted(targets))]
        exporting = jax.export.export(fun, platforms=["cpu"], disabled_checks=allowed)
        return exporting(*args)


def kept_arguments(fun: Callable[..., Any], args: Sequence[Any]) -> list[int]:
    """Which arguments a function reads, after its dead code is removed."""
    return list(without_dead_code(jax.make_jaxpr(fun)(*args), args).module_kept_var_idx)
