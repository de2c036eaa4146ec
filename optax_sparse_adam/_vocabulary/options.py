"""What a vocabulary is made with, and what a checkpoint says of it."""

import operator
from typing import Any, NamedTuple

import numpy as np

from .codes import as_array, codes_of
from .order import Score, by_hits, by_last

SCORES: dict[str, Score] = {"last": by_last, "hits": by_hits}


class Options(NamedTuple):
    """What a vocabulary was made with, but for its sizes; static in a pytree."""

    min_hits: int
    score: str | Score
    ttl: int | None
    padding: Any

    def numbers(self) -> np.ndarray:
        """Five numbers that differ where the options do, but for two functions."""
        names, score = [*SCORES], self.score
        by = names.index(score) if isinstance(score, str) else len(names)
        code, kind = np.zeros(1, np.uint64), 0
        if self.padding is not None:
            code, kind = code_of_padding(self.padding, 0)
        numbers = [self.min_hits, self.ttl or 0, by, kind]
        return np.append(np.array(numbers, np.int64), code.view(np.int64))


def checked_options(
    min_hits: int, score: str | Score, ttl: int | None, padding: Any
) -> Options:
    """The options, if each is one.

    Raises:
      TypeError: If a number is no integer, or the padding no key.
      ValueError: If one is out of range, or the score unknown.
    """
    if not callable(score) and not (isinstance(score, str) and score in SCORES):
        raise ValueError(
            'Vocabulary needs a score "last", "hits" or a function of both, got '
            f"{score!r}."
        )
    check_number("min_hits", min_hits, 1)
    if ttl is not None:
        check_number("ttl", ttl, 1)
    if padding is not None:
        code_of_padding(padding, 0)
    return Options(min_hits, score, ttl, padding)


def check_number(name: str, value: int, least: int) -> None:
    if not least <= as_integer(f"Vocabulary needs {name}", value) < 2**31:
        raise ValueError(
            f"Vocabulary needs {name} from {least} to 2**31 - 1, got {value}."
        )


def as_integer(rule: str, value: Any) -> int:
    """The number, if it is an integer; what needs it says so in front."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{rule} as an integer, got {value!r} of type {type(value).__name__}."
        ) from None


def code_of_padding(padding: Any, kind: int) -> tuple[np.ndarray, int]:
    """The code `[1]` of the padding key, in a vocabulary of this kind, and its kind."""
    array = as_array("Vocabulary(padding=...)", padding)
    if array.ndim:
        raise ValueError(
            "Vocabulary(padding=...) needs one key that means that there is none, got "
            f"{padding!r}. Leave others out by mask=, or replace them by one."
        )
    return codes_of("Vocabulary(padding=...)", array, kind)
