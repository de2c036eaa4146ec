"""What is measured: a table, batches of ids that touch its rows, and a loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Each round takes the next of these batches: a training step does not find the rows of
# its own batch in the caches, but those that batches have in common it does.
NUM_BATCHES = 8


class Problem(NamedTuple):
    """A size to measure.

    Attributes:
      rows: Rows of the table.
      dim: Length of a row.
      ids: Lookups in a batch.
      distribution: `"zipf"` or `"uniform"`.
      dtype: Type of the table, the moments and the gradient.
    """

    rows: int
    dim: int
    ids: int
    distribution: str
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.rows:,} x {self.dim} {self.dtype}, {self.ids:,} "
            f"{self.distribution} ids"
        )


class Batches(NamedTuple):
    """What a problem draws.

    Attributes:
      ids: `NUM_BATCHES` arrays of `[ids]` int32.
      values: `[ids, dim]` float32; the gradient of the rows in an update.
      weights: `[dim]` float32; the model has one output, `table[ids] @ weights`.
      touched: Different rows in a batch, averaged.
    """

    ids: list[NDArray[np.int32]]
    values: NDArray[np.float32]
    weights: NDArray[np.float32]
    touched: int


def draw(problem: Problem, seed: int = 0) -> Batches:
    """Draws the batches of a problem; the same for the same seed.

    Under `"zipf"` the logarithm of a row's rank is uniform: its frequency falls as
    1/rank. The ranks are spread over the table at random.
    """
    rng = np.random.default_rng(seed)
    rows, size = problem.rows, problem.ids
    if problem.distribution == "zipf":
        by_rank = rng.permutation(np.arange(rows, dtype=np.int32))
        # rows**u lies in [1, rows].
        ids = [
            by_rank[(float(rows) ** rng.random(size)).astype(np.int64) - 1]
            for _ in range(NUM_BATCHES)
        ]
    else:
        ids = list(rng.integers(rows, size=(NUM_BATCHES, size), dtype=np.int32))
    values = rng.standard_normal((size, problem.dim), dtype=np.float32)
    weights = rng.standard_normal(problem.dim, dtype=np.float32)
    touched = np.mean([len(np.unique(batch)) for batch in ids])
    return Batches(ids, values, weights, round(float(touched)))


def floor_bytes(
    problem: Problem, touched: int, itemsize: int, state_row_bytes: float
) -> int:
    """The bytes that an update or a step must move, however it is written.

    Each touched row of the table and of its state is read once and written once, and
    the rows of the batch, `[ids, dim]`, are read once: in an update they are the
    gradient, in a step what was looked up. With Adam and without duplicates these are
    seven streams of rows.
    """
    row_bytes = problem.dim * itemsize
    moved = 2 * touched * (row_bytes + state_row_bytes)
    return round(moved + problem.ids * row_bytes)


def loss(
    rows: Any, weights: Any, softplus: Callable[[Any], Any], mean: Callable[[Any], Any]
) -> Any:
    """The loss of every contestant, in its own arithmetic."""
    return mean(softplus(rows @ weights))
