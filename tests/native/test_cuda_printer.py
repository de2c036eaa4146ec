"""Each primitive that the printer knows, beside XLA, over special values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_sparse_adam._jax_extras.jaxprs import name_and_params
from optax_sparse_adam.native import _cuda_printer
from optax_sparse_adam.native._cuda_printer import Unsupported, print_formula

from ..helpers.cuda_on_cpu import CudaOnCpu
from ..helpers.native import needs_compiler

pytestmark = needs_compiler

TINY = np.float32(1e-45)
LARGEST = np.finfo(np.float32).max
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, TINY, -TINY, 1e-39, LARGEST, -LARGEST]
ORDINARY = [1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3e-5, 0.3, -0.7, 7.25, 88.8, -103.9]
LARGE = [2.0**31, -(2.0**31), 2.0**32, 3e9, -3e9, 1e30, 16777217.0, 1e-30, 33.0]
FLOATS = np.asarray([*SPECIAL, *ORDINARY, *LARGE], np.float32)
INTEGERS = [0, 1, -1, 2, -2, 7, 31, 32, 33, -33, 65537, 2**31 - 1, -(2**31), 1 << 30]
INTEGERS = np.asarray(INTEGERS, np.int64)


def of_lax(names):
    return {name: getattr(lax, name) for name in names.split()}


UNARY = {
    **of_lax(
        "neg abs sign sqrt rsqrt cbrt exp exp2 expm1 log log1p sin cos tan tanh "
        "sinh cosh asin acos atan asinh acosh atanh erf erfc floor ceil "
        "is_finite logistic square"
    ),
    "round": lax.round,
    "round_even": functools.partial(
        lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN
    ),
    **{f"power {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (0, 1, 2, 3, 7, -2)},
    "to int": lambda x: x.astype(jnp.int32),
    "to unsigned": lambda x: x.astype(jnp.uint32),
    "to bool": lambda x: x.astype(bool),
    "to bits": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "to bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "to float16": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "to e5m2": lambda x: x.astype(jnp.float8_e5m2).astype(jnp.float32),
    "to e4m3fn": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "less precise": lambda x: lax.reduce_precision(x, 8, 7),
}
BINARY = {
    **of_lax("add sub mul div max min rem pow atan2 nextafter eq ne lt le gt ge"),
    "select": lambda x, y: lax.select(x > y, x, y * 2),
    "clamp": lambda x, y: lax.clamp(y, x, jnp.full_like(x, 2.5)),
}
OF_INTEGERS = {
    **of_lax(
        "add sub mul div rem max min eq ne lt le gt ge bitwise_and bitwise_or "
        "bitwise_xor shift_left shift_right_logical shift_right_arithmetic"
    ),
    "not": lambda x, _: lax.bitwise_not(x),
    "neg": lambda x, _: lax.neg(x),
    "abs": lambda x, _: jnp.abs(x),
    "sign": lambda x, _: lax.sign(x),
    "square": lambda x, _: lax.square(x),
    "power": lambda x, _: lax.integer_pow(x, 5),
    "clamp": lambda x, y: lax.clamp(y, x, jnp.full_like(x, 9)),
    "to float": lambda x, _: x.astype(jnp.float32),
    "to bool": lambda x, _: x.astype(bool),
    "to other": lambda x, _: x.astype(
        jnp.uint32 if x.dtype == jnp.int32 else jnp.int32
    ),
}
# Of these XLA for CPUs has its own approximations, wrong by up to 1.5e-5 (cosh), as
# CUDA and the C library have theirs.
APPROXIMATE = of_lax(
    "rsqrt cbrt exp exp2 expm1 log log1p sin cos tan tanh sinh cosh asin acos atan "
    "asinh acosh atanh erf erfc logistic pow atan2"
)


def evaluated(functions, *operands):
    """The functions of rows, by the kernel."""
    like = [jax.eval_shape(f, *operands) for f in functions.values()]
    tables = tuple(jnp.zeros(x.shape, x.dtype) for x in like)

    def rows_fn(_, rows):
        inputs = rows[len(tables) :]
        return (), [function(*inputs) for function in functions.values()]

    indices = jnp.arange(len(operands[0]), dtype=jnp.int32)[:, None]
    _, found = CudaOnCpu()._update(
        _cuda_printer.ROWS, rows_fn, (), indices, tables, operands
    )
    return dict(zip(functions, found, strict=True))


def compare(functions, *operands):
    found = evaluated(functions, *operands)
    expected = jax.jit(lambda *x: {k: f(*x) for k, f in functions.items()})(*operands)
    for name in functions:
        actual, right = np.asarray(found[name]), np.asarray(expected[name])
        assert actual.dtype == right.dtype
        check(name, operands, actual, right)


def check(name, operands, actual, right):
    if actual.dtype != np.float32:
        same = actual == right
    else:
        # XLA for CPUs takes what is below the smallest normal number for zero; XLA for
        # GPUs, and CUDA, do not.
        small = [np.abs(np.asarray(x, np.float64)) < 1.2e-38 for x in operands]
        nonzero = [np.asarray(x) != 0 for x in operands]
        skip = np.any([a & b for a, b in zip(small, nonzero, strict=True)], axis=0)
        skip |= (np.abs(right) < 1.2e-38) & (np.abs(actual) < 1.2e-38)
        same = skip | (actual.view(np.int32) == right.view(np.int32))
        same |= np.isnan(actual) & np.isnan(right)
        if name in APPROXIMATE:
            with np.errstate(all="ignore"):
                same |= np.abs(actual.astype(np.float64) - right) <= 2e-5 * abs(right)
    for at in map(tuple, np.argwhere(~same)):
        values = *(x[at] for x in operands), actual[at], right[at]
        raise AssertionError(f"{name}: operands, actual, expected {values}")


@pytest.mark.slow
def test_of_one_float():
    compare(UNARY, jnp.asarray(FLOATS)[None])


def test_of_two_floats():
    x, y = np.meshgrid(FLOATS, FLOATS)
    compare(BINARY, jnp.asarray(x), jnp.asarray(y))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_of_integers(dtype):
    values = INTEGERS.astype(dtype)
    compare(OF_INTEGERS, *map(jnp.asarray, np.meshgrid(values, values)))


def test_every_primitive_is_compared():
    """Of each type that has it; `add_any` is what derivatives add."""
    x = jnp.ones((2, 2))
    cases = {"float": (UNARY, [x]), "int": (OF_INTEGERS, [x.astype(int)] * 2)}
    cases["float "] = BINARY, [x, x]
    compared = {
        (kind.strip(), name_and_params(eqn)[0])
        for kind, (functions, operands) in cases.items()
        for function in functions.values()
        for eqn in jax.make_jaxpr(function)(*operands).eqns
    }
    for kind in ("float", "int"):
        there = {name.split()[0] for name in _cuda_printer.TEMPLATES[kind]}
        missing = {name for name in there if (kind, name) not in compared}
        assert missing <= {"add_any", "and", "or", "xor"}, missing


ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((5, 12)), jnp.float32)


def mapped(row_fn, *shared, rows=ROWS):
    """`row_fn` of rows by the kernel and by XLA; raises what the printer says."""
    indices = jnp.arange(len(rows), dtype=jnp.int32)[:, None]

    def whole(grad, rows, *shared):
        return row_fn(grad, *shared), ()

    operands = rows, indices, (), (jnp.zeros_like(rows),), *shared
    found, _ = CudaOnCpu()._update(_cuda_printer.ROWS, whole, *operands)
    np.testing.assert_allclose(found, row_fn(rows, *shared), rtol=2e-6, atol=2e-6)
    return found


def calls(x):
    x = jax.jit(lambda x: x * 2.0)(x)
    x = jax.checkpoint(jnp.sin)(x)
    x = jax.nn.relu(x)  # a custom_jvp
    x = jax.lax.optimization_barrier(x)
    return jax.vmap(lambda row: row - jnp.max(row))(x)


def norms(x):
    total = jnp.sum(x * x, axis=1, keepdims=True)
    largest = jnp.max(jnp.abs(x), axis=1)[:, None]
    smallest = jnp.min(x, axis=1)[:, None]
    ones = jnp.sum(jnp.ones_like(x), axis=1)[:, None]
    return x / jnp.sqrt(total) + largest * smallest / ones


def test_rows():
    """Sums over columns, and what is inside of other functions."""
    mapped(lambda x: calls(x) + norms(x))


def test_what_all_rows_share():
    """Is computed before, as one array of numbers, and columns as they are."""
    scale, flag, count = jnp.float32(0.3), jnp.bool_(True), jnp.int32(7)
    columns = jnp.arange(12.0)

    def row_fn(x, scale, flag, count, columns):
        power = jnp.power(scale, count.astype(jnp.float32))
        x = jnp.where(flag, x * power, x) + jnp.log1p(columns)[None]
        return x * count.astype(jnp.float32)

    program = print_formula(
        lambda rows, *shared: [row_fn(rows[0], *shared)],
        [("g", (12,), jnp.float32, True)],
        12,
        (scale, flag, count, columns),
    )
    text = "\n".join(program.lines)
    assert "powf" not in text
    assert "log1pf" not in text
    assert sorted(x.size for x in program.shared) == [1, 1, 1, 12]
    mapped(row_fn, scale, flag, count, columns)


@pytest.mark.parametrize(
    ("row_fn", "words"),
    [
        (lambda x: jnp.cumsum(x, axis=1), "cumsum"),
        (lambda x: x - jnp.sum(x, axis=0, keepdims=True), "all rows at once"),
        (lambda x: x[:, ::-1], "rev of float32"),
        (lambda x: lax.digamma(x), "digamma of float32"),
        (lambda x: x + jnp.sum(x[:, :3], axis=1, keepdims=True), "slice"),
        (lambda x: x @ jnp.ones((12, 12)), r"shape \(12, 12\) that all"),
        (lambda x: x.astype(jnp.complex64).real, "complex64"),
        (lambda x: x.astype(jnp.int8).astype(jnp.float32), "int8"),
        (lambda x: lax.reduce_precision(x, 4, 3), "reduce_precision 4 3 of float32"),
    ],
)
def test_what_it_does_not_know(row_fn, words):
    with pytest.raises(Unsupported, match=words):
        mapped(row_fn)


def test_elements_of_a_shared_array():
    mapped(lambda x, y: x + y[2], jnp.arange(3.0))
