"""What is measured: a table, batches of ids that touch its rows, and a loss."""

from typing import NamedTuple

import numpy as np

# Each round takes the next of these batches: a training step does not find the rows of
# its own batch in the caches, but those that batches have in common it does.
NUM_BATCHES = 8


class Problem(NamedTuple):
    """A size to measure."""

    rows: int  # of the table
    dim: int  # length of a row
    ids: int  # lookups in a batch
    dtype: str  # of the table, the moments and the gradient
    draw: str = "zipf"  # how ids are drawn, one of DRAWS

    def __str__(self):
        ids = f"{self.ids:,} ids" + (self.draw != "zipf") * f", {self.draw}"
        dtype = (self.dtype != "float32") * f" {self.dtype}"
        return f"{in_short(self.rows)} x {self.dim}{dtype}, {ids}"


def in_short(number):
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


class Batches(NamedTuple):
    """What a problem draws."""

    ids: list[np.ndarray]  # NUM_BATCHES arrays, [ids] int32
    values: np.ndarray  # [ids, dim] float32, the gradient of the rows in an update
    weights: np.ndarray  # [dim] float32; the model is table[ids] @ weights
    touched: int  # different rows in a batch, averaged


def zipf(rng, rows, size):
    """Zipf's law: the logarithm of a row's rank is uniform, so that its frequency falls
    as 1/rank. The ranks are spread over the table at random.
    """
    by_rank = rng.permutation(np.arange(rows, dtype=np.int32))
    return lambda: by_rank[(float(rows) ** rng.random(size)).astype(np.int64) - 1]


def uniform(rng, rows, size):
    return lambda: rng.integers(0, rows, size, dtype=np.int32)


def different(rng, rows, size):
    return lambda: rng.choice(rows, size, replace=False).astype(np.int32)


def half_on_one_row(rng, rows, size):
    draw, row = uniform(rng, rows, size), rng.integers(rows)
    return lambda: np.where(np.arange(size) % 2, row, draw()).astype(np.int32)


DRAWS = {draw.__name__: draw for draw in (zipf, uniform, different, half_on_one_row)}


def draw(problem, seed=0):
    """Draws the batches of a problem; the same for the same seed."""
    rng = np.random.default_rng(seed)
    batch = DRAWS[problem.draw](rng, problem.rows, problem.ids)
    ids = [batch().astype(np.int32) for _ in range(NUM_BATCHES)]
    values = rng.standard_normal((problem.ids, problem.dim), dtype=np.float32)
    weights = rng.standard_normal(problem.dim, dtype=np.float32)
    touched = np.mean([len(np.unique(batch)) for batch in ids])
    return Batches(ids, values, weights, round(float(touched)))


def loss(rows, weights, softplus, mean):
    """The loss of every contestant, in its own arithmetic."""
    return mean(softplus(rows @ weights))
