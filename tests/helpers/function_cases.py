"""Cases for the gradient tests: functions around a lookup, of rows and of tables."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .gradients import (
    ROUNDED,
    TABLES,
    THROUGH_BFLOAT16,
    THROUGH_FLOAT16,
    Case,
    R,
    square,
)
from .transform_cases import loss, of_table


def of_rows(function, ulps=0.0, **kwargs):
    """The case of `function(table[ids])`."""
    return Case(
        lambda p, ids: square(function(p["t"][ids]), p["w"]), ulps=ulps, **kwargs
    )


@jax.custom_vjp
def tripled(x):
    return x


tripled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


@jax.custom_jvp
def odd_square(x):
    return x * x


odd_square.defjvps(lambda g, ans, x: 3 * g * x)


@jax.custom_vjp
def own_lookup(table, ids):
    return table[ids]


own_lookup.defvjp(
    lambda table, ids: (table[ids], (table, ids)),
    lambda saved, g: (jnp.zeros_like(saved[0]).at[saved[1]].add(3 * g), None),
)


@jax.jit
def look_up_bags(table, ids):  # the package has a function of this name, too
    return jnp.sin(table[ids])


@jax.jit
def sum_bags(x):  # and one of this name, in a custom_jvp
    return x * x


@jax.custom_jvp
def odd_sum_bags(x):
    return sum_bags(x)


odd_sum_bags.defjvps(lambda g, ans, x: 3 * g * x)


def residual(p, ids):
    h = p["t"][ids]
    for _ in range(2):
        h = h + jax.nn.relu(h @ p["m"]) - jnp.where(h > 1, h, 0)
    return square(h, p["w"])


ODD_IDS = np.arange(16) * 3 % 16  # as many as the table of ROWS has rows


def with_arrays(t):
    """Arrays of the table's shape: of NumPy, and written in the loss."""
    numbers = np.resize(np.asarray([0.5, -2, 1, 0.25, -1], t.dtype), t.shape)
    literal = jnp.array(numbers.tolist())
    return jnp.where(numbers > 0, t * literal, t / literal)


def in_while_loop(p, ids):
    """Loops that have no derivative; under `vmap` each ends by itself."""
    fixed = lax.stop_gradient(jnp.tanh(p["t"]))
    more = lax.while_loop(lambda c: c < 9.0, lambda c: c + fixed[0, 0] ** 2 + 1, 0.0)

    def walk(row):
        def step(carry):
            steps, row, found = carry
            return steps + 1, (3 * row + 1) % len(fixed), found + fixed[row, 0]

        def goes_on(carry):
            return (carry[0] < 8) & (fixed[carry[1], 1] < 0.5)

        return lax.while_loop(goes_on, step, (0, row, jnp.zeros_like(fixed[0, 0])))[2]

    return (more + jnp.sum(jax.vmap(walk)(ids.ravel() % len(fixed)))) * loss(p, ids)


def on_other_platforms(p, ids):
    """Branches for them are not compiled, as under JAX; here one could not be."""

    def elsewhere(t):
        rows = lax.stop_gradient(t[ids])
        return jax.ffi.ffi_call("not_here", jax.typeof(rows))(rows)

    rows = lax.platform_dependent(p["t"], tpu=elsewhere, default=lambda t: t[ids])
    return square(rows, p["w"])


def norm_of_gradient(p, ids):
    grad = jax.grad(lambda t: loss({**p, "t": t}, ids))(p["t"])
    return loss(p, ids) + jnp.linalg.norm(grad)


FUNCTIONS = {
    # custom derivatives
    **{
        f"{function.__name__} of rows": of_rows(function, ROUNDED, touches_more=True)
        for function in (jax.nn.relu, odd_square)
    },
    "logsumexp of rows": Case(
        lambda p, i: jnp.sum(jax.nn.logsumexp(p["t"][i], axis=-1)), ulps=ROUNDED
    ),
    "custom_vjp of rows": of_rows(tripled),
    "custom_vjp of the loss": Case(lambda p, i: tripled(loss(p, i))),
    "custom_jvp of the loss": Case(lambda p, i: odd_square(loss(p, i))),
    # a rule of its own says what the gradient of the table is, for all of its rows
    **{
        f"{function.__name__} of the table": of_table(function, ROUNDED, nse=None)
        for function in (jax.nn.relu, odd_square)
    },
    "custom_vjp of the lookup": Case(
        lambda p, i: square(own_lookup(p["t"], i), p["w"]), None
    ),
    # a function of the table, then the lookup
    "cast": of_table(
        lambda t: t.astype(jnp.bfloat16).astype(jnp.float32), THROUGH_BFLOAT16
    ),
    "cast of rows": Case(
        lambda p, i: square(p["t"].astype(jnp.float16)[i].astype(jnp.float32), p["w"]),
        ulps=THROUGH_FLOAT16,
    ),
    "names of the package": Case(
        lambda p, i: square(look_up_bags(sum_bags(p["t"]), i), p["w"]), ulps=ROUNDED
    ),
    "names of the package, own rule": Case(
        lambda p, i: square(odd_sum_bags(p["t"])[i], p["w"]), None
    ),
    "times a number": of_table(lambda t: t * 2.0),
    "times a traced number": Case(
        lambda p, i: square((p["t"] * i[0, 1].astype(float))[i], p["w"])
    ),
    "times a parameter": Case(lambda p, i: square((p["t"] * p["w"][0])[i], p["w"])),
    "affine": of_table(lambda t: 1 - 2 * t),
    "with arrays of its shape": of_table(with_arrays),
    "checkpoint of a function": of_table(
        lambda t: jax.checkpoint(jnp.tanh)(t), ROUNDED
    ),
    "plus its rounding": of_table(lambda t: t + jnp.round(t)),
    "squared": of_table(lambda t: t * t),
    "where": of_table(lambda t: jnp.where(t > 0.5, t, 2 * t)),
    "tanh of the table": of_table(jnp.tanh, ROUNDED, touches_more=True),
    "logarithm of the table": of_table(
        lambda t: jnp.log2(1 + t * t), ROUNDED, touches_more=True
    ),
    "clipped": of_table(lambda t: jnp.clip(t, -0.5, 0.5), touches_more=True),
    "cast, scaled, tanh": Case(
        lambda p, i: square(
            jnp.tanh(2 * p["t"].astype(jnp.bfloat16))[i].astype(jnp.float32), p["w"]
        ),
        ulps=2 * THROUGH_BFLOAT16,
    ),
    "sum of tables": Case(
        lambda p, i: square((p["t"] + p["s"])[i], p["w"]), {"t": 6, "s": 6}, TABLES
    ),
    "product of tables": Case(
        lambda p, i: square((p["t"] * p["s"])[i], p["w"]), {"t": 6, "s": 6}, TABLES
    ),
    # the table elsewhere, its gradient stopped
    "stopped norm": Case(
        lambda p, i: loss(p, i) + jnp.sum(jnp.square(lax.stop_gradient(p["t"])))
    ),
    "stopped lookup": Case(
        lambda p, i: square(p["t"][i] * lax.stop_gradient(p["t"])[i], p["w"])
    ),
    "stopped tanh": of_table(lambda t: t * lax.stop_gradient(jnp.tanh(t)), ROUNDED),
    "floor of the sum": Case(
        lambda p, i: loss(p, i) * (jnp.floor(jnp.sum(p["t"])) + 100)
    ),
    "while loop": Case(in_while_loop, ulps=ROUNDED),
    "other platforms": Case(on_other_platforms),
    "norm of an inner gradient": Case(norm_of_gradient, 12, ulps=2048),
    "stopped output weights": Case(
        lambda p, i: jnp.sum(jnp.square(p["t"][i] @ lax.stop_gradient(p["t"]).T))
    ),
    "straight through": of_table(
        lambda t: t + lax.stop_gradient(jnp.round(t) - t), touches_more=True
    ),
    # activations that happen to have the shape of the table
    "shape of the table": Case(
        residual, 16, {"t": (R, 4), "m": (4, 4), "w": (4,)}, ODD_IDS
    ),
}
if hasattr(lax, "polynomial"):  # since JAX 0.12
    FUNCTIONS["polynomial of the table"] = of_table(
        lambda t: lax.polynomial(t, [1.0, 3.0, 2.0]), ROUNDED, touches_more=True
    )
