"""Rounding to low-precision types, at random and right on average."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_LARGEST = float(jnp.finfo(jnp.float32).max)


def _round(
    how: Callable[[jax.Array], jax.Array], x: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Rounds float32 values to the grid of a type, ignoring overflow.

    In float32, with powers of two, where all of this is exact: XLA may leave out a cast
    to a type and back. Devices flush values below 2**-126 to 0; so that differences of
    these results and their 24 bits stay above, steps are at least 2**-102. Of the low
    types only bfloat16 has smaller ones, below 2**-95 = 2.5e-29.

    `how` is `jnp.floor`, `jnp.ceil`, or `jnp.round`, which rounds ties to even.
    """
    info = jnp.finfo(dtype)
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
    # Values of exponent e are 2**(e - nmant) apart; subnormal ones as the smallest.
    # For 1.3 and bfloat16, with 7 bits of mantissa: the exponent is 127, the step
    # 2**-7, and `how` sees 1.3 * 128 = 166.4. Down it is 166 / 128, up 167 / 128, and
    # `_choose` takes the upper one with a probability of 0.4.
    exponent = jnp.maximum(exponent, info.minexp + 127) - info.nmant
    exponent = jnp.maximum(exponent, 127 - 102)
    step, inverse = (
        lax.bitcast_convert_type(e << 23, jnp.float32)
        for e in (exponent, 254 - exponent)
    )
    return how(x * inverse) * step


def _adjacent(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The largest value of a type that is at most `x`, the smallest at least `x`."""
    largest = min(float(jnp.finfo(dtype).max), _LARGEST)
    below, above = (_round(how, x, dtype) for how in (jnp.floor, jnp.ceil))
    return jnp.clip(below, -largest, largest), jnp.clip(above, -largest, largest)


def nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 values to the nearest ones of a type, in float32."""
    near = _round(jnp.round, x, dtype)
    beyond = jnp.abs(near) > min(float(jnp.finfo(dtype).max), _LARGEST)
    return jnp.where(beyond, jnp.copysign(jnp.inf, near), near)


def random_bits(keys: Iterator[jax.Array]) -> Callable[[tuple[int, ...]], jax.Array]:
    """A function that draws 32 random bits for each element of an array of a shape.

    Random bits are the larger part of the cost. A choice almost never looks at more
    than the first 16 of them, so every second array of a shape gets those of the one
    before with the halves exchanged: each is uniform, and all but independent of it.
    """
    spare: dict[tuple[int, ...], jax.Array] = {}

    def draw(shape: tuple[int, ...]) -> jax.Array:
        if shape in spare:
            bits = spare.pop(shape)
            return (bits << 16) | (bits >> 16)
        spare[shape] = jax.random.bits(next(keys), shape, jnp.uint32)
        return spare[shape]

    return draw


def _choose(bits: jax.Array, x: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """True with probability `(x - lo) / (hi - lo)`, to 2**-32; False if hi is inf.

    True, too, where this is undefined: where `lo == hi`, or `lo` is -inf.
    """
    share = (x - lo) / (hi - lo)
    return ~(share < 1) | (bits < (share * 2.0**32).astype(jnp.uint32))


def round_value(bits: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    x = x.astype(jnp.float32)
    below, above = _adjacent(x, dtype)
    rounded = jnp.where(_choose(bits, x, below, above), above, below)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)


def round_update(
    bits: jax.Array, param: jax.Array, update: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """An update of a type that, added and rounded to nearest, is right on average.

    The sum is one of two values, next to `param + update` wherever updates of this
    type reach those.
    """
    old = param.astype(jnp.float32)
    x = old + update.astype(jnp.float32)
    downs, ups = (_adjacent(y - old, dtype) for y in _adjacent(x, param.dtype))
    # Where a row moves by more than its size, updates are further apart than the values
    # that they lead to, and that on the other side may round to what is meant.
    lows, highs = ([nearest(old + y, param.dtype) for y in z] for z in (downs, ups))
    is_far, is_near = lows[1] > x, highs[0] >= x
    down, lo = (jnp.where(is_far, y[0], y[1]) for y in (downs, lows))
    up, hi = (jnp.where(is_near, y[0], y[1]) for y in (ups, highs))
    rounded = jnp.where(_choose(bits, x, lo, hi), up, down)
    rounded = jnp.where(jnp.isfinite(x), rounded, x)
    # Adding -0.0 changes no value; 0.0 would change -0.0.
    return jnp.where(x == old, -0.0, rounded).astype(dtype)
