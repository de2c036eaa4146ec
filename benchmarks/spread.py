"""Medians and quartiles of times."""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    middle: float
    low: float
    high: float


def spread(values):
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high))


def ratio(ours, theirs):
    """The ratio of the medians, and the quartiles of the ratios of each round."""
    rounds = [a / b for a, b in zip(ours, theirs, strict=False)]
    _, low, high = spread(rounds)
    return Spread(float(np.median(ours) / np.median(theirs)), low, high)
