"""What the tests share: comparisons that show numbers, references in plain NumPy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from .versions import SAME_BITS_FOR_ALL_SHAPES

# Set by the workflow's job of each week, which has time for all products.
WEEKLY = os.environ.get("OPTAX_SPARSE_ADAM_TEST_WEEKLY") == "1"


def slow_but(cases, *core, is_one_value=False):
    """The cases of `parametrize`, marked slow but for those of the core.

    A tuple is the values of several parameters, unless it is said to be one value.
    """
    return [
        pytest.param(
            *(x if type(x) is tuple and not is_one_value else (x,)),
            marks=() if any(x is y or x == y for y in core) else pytest.mark.slow,
        )
        for x in cases
    ]


def need_devices(number):
    """Skips the test where there are fewer: see `conftest.py`."""
    if number > jax.device_count():
        pytest.skip(f"needs {number} devices")


class Tolerance(NamedTuple):
    """How far two results may be apart, relative to a magnitude (see `Magnitude`)."""

    torch: float
    numpy: float
    sum: float


# torch: the same formula in the same type, for up to 20 steps. XLA contracts multiply
#   and add where torch rounds twice, and the scalars of a step are rounded at other
#   places. One unit in the last place is 6e-8 or 1.1e-16; torch computes `1 - b**t`
#   with cancellation, which leaves 1e-13 of it in float64.
# numpy: the formula in float64, in which the reference computes too; a few steps.
# sum: one rounding for each addend, relative to the sum of the absolute values.
TOLERANCE = {
    "float32": Tolerance(torch=1e-6, numpy=1e-6, sum=6e-8),
    "float64": Tolerance(torch=1e-12, numpy=1e-14, sum=1.2e-16),
}


def assert_close(actual, expected, tol, *, magnitude=None, what="result"):
    """Each element within `tol * magnitude`, by default `tol * abs(expected)`."""
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected).astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, {expected.shape}"
    magnitude = np.abs(expected) if magnitude is None else magnitude
    magnitude = np.broadcast_to(magnitude, actual.shape)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    error = np.where(same, 0.0, np.abs(actual - expected))
    bad = ~(error <= tol * magnitude)
    if bad.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.nan_to_num(error / magnitude, nan=np.inf, posinf=np.inf)
        at = np.unravel_index(np.argmax(np.where(bad, relative, -1)), bad.shape)
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} elements differ. The worst, at "
            f"{[int(i) for i in at]}, is {actual[at]}, not {expected[at]}: off by "
            f"{relative[at]:.3g} of {magnitude[at]}, allowed is {tol:.3g}."
        )


def assert_same_on_devices(actual, expected, what="result"):
    """Bit for bit, as far as XLA's CPU compiler compiles one formula alike.

    That of jaxlib 0.12 does not for arrays of different shapes: a last bit may differ.
    """
    if SAME_BITS_FOR_ALL_SHAPES:
        return assert_identical(actual, expected, what)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, e in pairs:
        largest = np.max(np.abs(e), initial=0)
        assert_close(a, e, 2.0**-22, magnitude=largest, what=what)


class Magnitude:
    """The largest absolute value that each element has had so far.

    Errors are measured against it, because a difference of nearly equal numbers has the
    error of the numbers: a moment that decays to nothing keeps its old rounding.
    """

    def __init__(self, start=0.0):
        self.largest = np.abs(np.asarray(start, np.float64))

    def include(self, values):
        values = np.abs(np.asarray(values, np.float64))
        self.largest = np.maximum(self.largest, values)

    def check(self, actual, expected, tol, what):
        self.include(expected)
        assert_close(actual, expected, tol, magnitude=self.largest, what=what)


def assert_identical(actual, expected, what="result"):
    """Two trees: the same structure, shapes, types and bits (of NaN and zeros too)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for number, (a, e) in enumerate(pairs):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{what}, leaf {number}"
        different = (bits(a) != bits(e)).reshape(a.shape)
        if different.any():
            at = tuple(np.argwhere(different)[0])
            raise AssertionError(
                f"{what}, leaf {number}: {different.sum()} of {different.size} "
                f"elements differ. The first, at {[int(i) for i in at]}, is "
                f"{a[at]!r}, not {e[at]!r}."
            )


def bits(array):
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def bcoo(values, indices, shape, **flags):
    return BCOO((on_device(values), on_device(indices)), shape=shape, **flags)


def abstract_bcoo(shape, nse, n_sparse=1, dtype="float32", **flags):
    """Shapes alone, to compile for tables of any size."""
    data = jax.ShapeDtypeStruct((nse, *shape[n_sparse:]), dtype)
    indices = jax.ShapeDtypeStruct((nse, n_sparse), "int32")
    return jax.eval_shape(lambda *args: bcoo(*args, shape, **flags), data, indices)


def on_device(x):
    """`jnp.asarray` compiles a program for each shape of an array of NumPy."""
    return jax.device_put(x) if isinstance(x, np.ndarray) else jnp.asarray(x)


def to_dense(grad):
    """The array that a BCOO stands for, by a loop of NumPy over its entries.

    `BCOO.todense` would be compiled for each shape and each number of entries.
    """
    indices, values = np.asarray(grad.indices), np.asarray(grad.data)
    real = ((indices >= 0) & (indices < grad.shape[: grad.n_sparse])).all(axis=1)
    array = np.zeros(grad.shape, values.dtype)
    np.add.at(array, tuple(indices[real].T), values[real])
    return array


def random_entries(rng, shape, n_sparse, nse, dtype="float32", outside=False):
    """Values and indices with duplicates, explicit zeros and, on request, padding.

    The values are multiples of 2**-5 below 1: sums of up to 64 of them, and the squares
    of these, are exact in float32, in any order.
    """
    values = rng.integers(-31, 32, (nse, *shape[n_sparse:])) / 32
    values[rng.random(nse) < 0.15] = 0
    low, high = (-3, 3) if outside else (0, 0)
    indices = [rng.integers(low, n + high, nse) for n in shape[:n_sparse]]
    return values.astype(dtype), np.stack(indices, axis=1).astype(np.int32)


def row_sums(values, indices, shape):
    """The rows that lie in the table, ascending, each with its sum in float64."""
    sums = {}
    for row, value in zip(indices.tolist(), values, strict=True):
        if all(0 <= i < n for i, n in zip(row, shape, strict=False)):
            sums[tuple(row)] = sums.get(tuple(row), 0.0) + value.astype(np.float64)
    return dict(sorted(sums.items()))


class NumpyAdam:
    """The formula in float64, in a loop over rows.

    `step` takes the sums of `row_sums`, or a dense gradient, of which `()` is the row.
    """

    def __init__(self, table, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
        self.table = np.array(table, np.float64)
        self.mu, self.nu = np.zeros_like(self.table), np.zeros_like(self.table)
        self.lr, self.b1, self.b2, self.eps, self.count = lr, b1, b2, eps, 0

    def step(self, gradient):
        self.count += 1
        rows = gradient if isinstance(gradient, dict) else {(): gradient}
        size = self.lr * np.sqrt(1 - self.b2**self.count) / (1 - self.b1**self.count)
        for row, g in rows.items():
            self.mu[row] += (1 - self.b1) * (g - self.mu[row])
            self.nu[row] += (1 - self.b2) * (g * g - self.nu[row])
            self.table[row] -= size * self.mu[row] / (np.sqrt(self.nu[row]) + self.eps)


def compile_for_users(lowered):
    """The program that users get, for a look at its text and its memory.

    For the tests XLA leaves its fusion emitters out (`conftest.py` says why), and fuses
    otherwise then.
    """
    return lowered.compile(compiler_options=_for_users())


def jit_for_users(function):
    """`jax.jit`, compiled as for users.

    Without its fusion emitters XLA for CPUs clamps where a slice of rows begins in the
    type of the index: of 1,000 rows and an int8, to -25, and writes there.
    """
    return jax.jit(function, compiler_options=_for_users())


def _for_users():
    are_left_out = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    return {"xla_cpu_use_fusion_emitters": True} if are_left_out else {}


def assert_same_memory(small, large):
    """The bytes that programs for two heights of a table hold for a moment."""
    # Elsewhere buffers are packed anew, by what else is there.
    slack = 0 if jax.default_backend() == "cpu" else 0.01
    assert abs(large - small) <= slack * small, f"{small} and {large} bytes"


def program_environment():
    """For a program in a process of its own: this package, CPUs, no flags of tests.

    And no kernel, whether or not the installation has one: the tests' process has none.
    """
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "OPTAX_SPARSE_ADAM_NATIVE": "0",
    }
    return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def ran(program, *arguments):
    """What a program in a process of its own has ended with, and has printed."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
