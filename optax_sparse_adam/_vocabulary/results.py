"""What a `Vocabulary` returns: rows that can be padded, and what has changed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .options import as_integer


class FreshRows(np.ndarray):
    """Rows of a table, `[n]` int32: an array of NumPy that can be padded.

    Attributes:
      vocabulary: A weak reference to the one that they are of; `None` in copies.
    """

    vocabulary: Callable[[], object] | None = None

    def padded(self, least: int) -> np.ndarray:
        """The rows, and -1 after them, which is padding for `reset_rows`.

        Args:
          least: The shortest length. A longer one is this times 2, 4, 8, ..., so that a
            compiled function meets few shapes.

        Raises:
          TypeError: If `least` is no integer.
          ValueError: If it is below 1.
        """
        size = as_integer("padded needs a length", least)
        if size < 1:
            raise ValueError(f"padded needs a length of at least 1, got {size}.")
        while size < len(self):
            size *= 2
        result = np.full(size, -1, self.dtype)
        result[: len(self)] = self
        return result


class _Assignment(NamedTuple):
    rows: np.ndarray
    fresh: FreshRows
    evicted: np.ndarray


class Assignment(_Assignment):
    """What `Vocabulary.assign` has done: `rows, fresh, evicted`.

    Attributes:
      rows: int32, in the shape of the keys: the row of each.
      fresh: `[n]`, int32: rows that have a new key, in the order in which these keys
        first come in the batch. Values and state of such a row are nobody's, or those
        of a key that has gone: begin it again. `fresh.padded(64)` has one of few
        lengths: 64, 128, 256, ...; the rest is -1, padding for `reset_rows`.
      evicted: `[m]`, int64 or uint64: keys that have lost their row (of strings, their
        hashes). First those that were not there for `ttl` steps, by row; then those
        that had to make room, by score and row.
      fresh_keys: `[n]`, likewise: the keys of `fresh`, for values by key. No part of
        the tuple, and `None` in a copy of it that is made of its three parts.
    """

    fresh_keys: np.ndarray | None = None

    def __new__(
        cls,
        rows: np.ndarray,
        fresh: FreshRows,
        evicted: np.ndarray,
        fresh_keys: np.ndarray | None = None,
    ) -> "Assignment":
        self = super().__new__(cls, rows, fresh, evicted)
        self.fresh_keys = fresh_keys
        return self


class ChangedRows(NamedTuple):
    """What `Vocabulary.changed_since` has found.

    Attributes:
      keys: `[n]`, int64 or uint64: keys that have got their row since then, by row.
      rows: `[n]`, int32: these rows.
      gone: `[m]`: keys that have lost their row since then and have none now, each
        once, in the order in which they went: tombstones.
    """

    keys: np.ndarray
    rows: np.ndarray
    gone: np.ndarray
