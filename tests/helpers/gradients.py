"""What the gradient tests share: a case, its numbers, and the comparison with JAX."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from .support import assert_close, on_device, to_dense

# One unit in the last place of the largest number below 2 in each type.
ULP = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
# In units of float32: arithmetic that passes through a lower type rounds there, where
# JAX adds up duplicate rows before the rounding to float32, and the library after.
THROUGH_BFLOAT16 = 2 * ULP["bfloat16"] / ULP["float32"]
THROUGH_FLOAT16 = 2 * ULP["float16"] / ULP["float32"]
# Elementwise functions are compiled into other kernels than under JAX, and rounded a
# few times in each.
ROUNDED = 16

R = None  # stands for the number of rows in the shape of a table
ROWS = 16
SMALL_TABLE = {"t": (5, 4), "w": (4,)}
TABLE = {"t": (R, 4), "w": (4,)}
TABLES = {"t": (R, 4), "s": (R, 4), "w": (4,)}

IDS = [[0, 3, -1], [3, 7, 0]]
FAR_IDS = [[0, 3, 10**7], [3, -(10**7), -1]]
SMALL_IDS = [[0, 3, -1], [3, 2, 0]]


class Case(NamedTuple):
    """A loss `loss(params, ids)` and what its gradient must be.

    Attributes:
      loss: The loss.
      nse: Entries of each row-sparse leaf, by name; all other leaves are dense. A
        number stands for the leaf "t", `None` for no leaf at all.
      params: Shapes of the parameters, by name, with `R` for the number of rows.
      ids: Integers.
      n_sparse: Of each row-sparse leaf.
      ulps: Allowed difference from JAX. Zero by default: parameters are small multiples
        of 1/8, so that sums and products are exact in any order.
      touches_more: Rows with a zero gradient are among the touched.
      dtype: Of the parameters.
      id_dtype: Of the ids.
    """

    loss: Callable[..., Any]
    nse: Mapping[str, int] | int | None = 6
    params: Mapping[str, Any] = TABLE
    ids: Any = IDS
    n_sparse: int = 1
    ulps: float = 0
    touches_more: bool = False
    dtype: str = "float32"
    id_dtype: str = "int32"

    @property
    def entries(self) -> Mapping[str, int]:
        if self.nse is None:
            return {}
        return {"t": self.nse} if isinstance(self.nse, int) else self.nse

    @property
    def has_table(self) -> bool:
        """Whether a leaf is row-sparse and as high as one likes."""
        return any(R in self.params[name] for name in self.entries)

    def inputs(self, rows: int = ROWS) -> tuple[Any, Any]:
        """Parameters, nowhere zero and of both signs in tables, and the ids."""
        rng = np.random.default_rng(0)
        params = {}
        for name, shape in self.params.items():
            shape = [rows if size is R else size for size in shape]
            values = rng.integers(1, 9, shape) / 8
            if name in ("t", "s"):
                values = values * rng.choice([-1, 1], shape)
            params[name] = on_device(np.asarray(values, self.dtype))
        return params, on_device(np.asarray(self.ids, self.id_dtype))

    def abstract(self, rows: int) -> tuple[Any, Any]:
        """The same as shapes and types, for compiling without data."""
        params = {
            name: jax.ShapeDtypeStruct(
                tuple(rows if size is R else size for size in shape), self.dtype
            )
            for name, shape in self.params.items()
        }
        return params, jax.ShapeDtypeStruct(np.shape(self.ids), self.id_dtype)


def square(rows, w):
    """A loss that is nonlinear in the rows, exact in float32 for the cases' numbers."""
    return jnp.sum(jnp.square(rows @ w))


def is_bcoo(x):
    return isinstance(x, BCOO)


def dense(tree):
    """Every row-sparse leaf of a tree as an array."""

    def one(x):
        if not is_bcoo(x):
            return x
        if isinstance(x.data, jax.core.Tracer):
            return x.todense()
        if x.n_batch == 0:
            return to_dense(x)
        parts = zip(np.asarray(x.data), np.asarray(x.indices), strict=True)
        return np.stack([one(BCOO(part, shape=x.shape[1:])) for part in parts])

    return jax.tree.map(one, tree, is_leaf=is_bcoo)


def touched_rows(grad):
    """The rows that a row-sparse gradient holds, ascending."""
    shape = grad.shape[: grad.n_sparse]
    rows = {tuple(row) for row in np.asarray(grad.indices).tolist()}
    return sorted(
        row for row in rows if all(0 <= i < n for i, n in zip(row, shape, strict=True))
    )


def assert_row_sparse(grad, shape, dtype, nse, n_sparse=1, what="the gradient"):
    """The layout of a row-sparse gradient of a table of this shape and type."""
    assert is_bcoo(grad), f"{what} is dense"
    layout = (grad.shape, grad.dtype, grad.nse, grad.n_sparse, grad.n_batch)
    expected = (tuple(shape), jnp.dtype(dtype), nse, n_sparse, 0)
    assert layout == expected, f"{what}: {layout}, not {expected}"
    assert jnp.issubdtype(grad.indices.dtype, jnp.integer), f"{what}: {grad.indices}"
    rows = np.asarray(grad.indices).tolist()
    assert not grad.indices_sorted or rows == sorted(rows), f"{what} is not sorted"
    is_unique = len(set(map(tuple, rows))) == len(rows)
    assert not grad.unique_indices or is_unique, f"{what} is not unique: {rows}"


def assert_same(actual, expected, ulps=0, what="the gradient"):
    """The same numbers and type, bit for bit or in units of the last place.

    Units of the largest number of the leaf, as a derivative such as `1 - tanh(x)**2` is
    a difference of nearly equal numbers.
    """
    stored = actual.data if is_bcoo(actual) else actual
    is_weak = jax.typeof(stored).weak_type
    actual = dense(actual)
    kind = actual.shape, actual.dtype, is_weak
    kind_expected = expected.shape, expected.dtype, jax.typeof(expected).weak_type
    assert kind == kind_expected, f"{what}: {kind}, not {kind_expected}"
    magnitude = np.max(np.abs(np.asarray(expected, np.float64)), initial=0)
    tol = ulps * ULP[expected.dtype.name]
    assert_close(actual, expected, tol, magnitude=magnitude, what=what)


def check(case, result, expected, what):
    """Value and gradient against JAX's, and the kind of each leaf."""
    (value, grads), (expected_value, expected_grads) = result, expected
    assert_same(value, expected_value, case.ulps, f"{what}: value")
    assert set(grads) == set(expected_grads)
    for name, grad in grads.items():
        where, like = f"{what}: {name}", expected_grads[name]
        if name in case.entries:
            nse = case.entries[name]
            assert_row_sparse(grad, like.shape, like.dtype, nse, case.n_sparse, where)
            numbers = np.asarray(like, np.float64)
            numbers = numbers.reshape(*numbers.shape[: case.n_sparse], -1)
            moved = sorted(map(tuple, np.argwhere(numbers.any(axis=-1)).tolist()))
            touched = touched_rows(grad)
            if case.touches_more:
                assert set(touched) >= set(moved), f"{where} touches {touched}"
            else:
                assert touched == moved, f"{where} touches {touched}, not {moved}"
        elif is_bcoo(grad):  # as a leaf that the loss does not use
            assert_row_sparse(grad, like.shape, like.dtype, 0, what=where)
        else:
            assert isinstance(grad, jax.Array), f"{where} is a {type(grad).__name__}"
        assert_same(grad, like, case.ulps, where)
