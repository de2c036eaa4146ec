"""The state of `exact_adam` before the first step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax_extras.huge_pages import use_huge_pages
from .._optimizers.by_leaf import all_but_last
from .._rows.checks import refuse_complex
from .._rows.entries import accumulator_dtype
from .._rows.new_arrays import full_along
from .schedule import constants_of, fit
from .state import ExactAdamState
from .step import Betas


def new_state(
    params: optax.Params, betas: Betas, mu_dtype: Any, name: str
) -> ExactAdamState:
    """All rows hold their values; `name` is that of the optimiser."""
    decays = name == "exact_adamw"
    for leaf in jax.tree.leaves(params):
        refuse_complex(leaf, name)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                "exact_adam trains floating-point parameters, got "
                f"{jnp.result_type(leaf)} of shape {jnp.shape(leaf)}. Leave it out "
                "with optax.masked or optax.partition."
            )
    use_huge_pages(params)
    dtype = jnp.result_type(float)
    degree = fit(betas.b1, betas.b2, dtype)[1]

    def for_each(make: Callable[[Any], jax.Array]) -> Any:
        return jax.tree.map(make, params)

    def for_rows(param: Any, dtype: Any) -> jax.Array:
        return full_along(param, 0, dtype, all_but_last(jnp.ndim(param)))

    def log_decay(param: Any) -> jax.Array:
        return for_rows(param, accumulator_dtype(jnp.result_type(param)))

    size = len(jax.tree.leaves(params))
    return ExactAdamState(
        count=jnp.zeros([], jnp.int32),
        mu=for_each(functools.partial(full_along, dtype=mu_dtype)),
        nu=for_each(full_along),
        last=for_each(lambda param: for_rows(param, jnp.int32)),
        log_decay=(for_each(log_decay), for_each(log_decay)) if decays else (),
        clock=jnp.zeros([], jnp.int32),
        origin=jnp.zeros([], jnp.int32),
        values_until=jnp.zeros([size], jnp.int32),
        remaining=jnp.zeros([size, 2, degree], dtype),
        decay=jnp.zeros([size, 2], dtype) if decays else (),
        constants=constants_of(betas, dtype),
    )
