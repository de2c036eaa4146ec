"""Keys of a vocabulary, found and counted by the library, else by NumPy.

NumPy goes over all keys of a batch once for each of some thirty small operations, and
for each new key again. `keys.h` goes over them once, fetches what several keys need
side by side, and waits outside of the interpreter's lock. Its results are those of
`_vocabulary/index.py` and `_vocabulary/store.py`, which call it and do the same where
a function here says that there is no library.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import _library
from ._records import num_threads

_FEWEST = 64  # with fewer keys NumPy takes as long
_NO_BYTES = ctypes.c_char * 0


class _Functions(NamedTuple):
    find: "ctypes._NamedFuncPointer"
    insert: "ctypes._NamedFuncPointer"
    replace: "ctypes._NamedFuncPointer"
    look_up: "ctypes._NamedFuncPointer"
    touch: "ctypes._NamedFuncPointer"
    lowest: "ctypes._NamedFuncPointer"


def functions_of(library: Path) -> _Functions:
    """Those of a library."""
    dll = ctypes.CDLL(str(library))
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    functions = _Functions(*(getattr(dll, f"{x}_keys") for x in _Functions._fields))
    functions.find.argtypes = [pointer, pointer, number, pointer, number]
    functions.insert.argtypes = [pointer, pointer, number, number]
    of_codes: list[Any] = [pointer, whole, pointer, number]
    functions.replace.argtypes = [*functions.insert.argtypes, *of_codes]
    functions.look_up.argtypes = [*functions.find.argtypes, *7 * [pointer]]
    functions.touch.argtypes = [pointer, pointer, number, whole, whole, pointer]
    of_run: list[Any] = [*3 * [pointer], number]
    functions.lowest.argtypes = [*of_run, whole, whole, number, pointer]
    for function in functions:
        function.restype = None
    functions.insert.restype = functions.replace.restype = whole
    for function in (functions.look_up, functions.lowest):
        function.restype = number
    return functions


@functools.cache
def _functions() -> _Functions | None:
    return _library.on_the_host(functions_of)


def _wanted(number: int) -> _Functions | None:
    return _functions() if number >= _FEWEST else None


class Place:
    """Where an index lies in memory: `Index` of `keys.h`.

    Args:
      slots: `[2**bits]`, int32.
      table: `[rows, 2]`, uint64, whose first column are codes. Both are contiguous, and
        stay where they are.
      shift: `64 - bits`.
      multipliers: Both, uint64.
    """

    def __init__(
        self, slots: np.ndarray, table: np.ndarray, shift: int, multipliers: np.ndarray
    ):
        self._arrays = slots, table
        addresses = [x.ctypes.data for x in self._arrays]
        numbers = [*addresses, len(table), shift, *multipliers.tolist()]
        self._words = np.array(numbers, np.uint64)
        self.address = self._words.ctypes.data


def _start_of(x: Any) -> Any:
    """Where the entries of an array lie, for ctypes.

    `x.ctypes.data` is the same, and takes ten times as long, which for what a batch has
    in new keys was more than all the rest. Test: `test_arrays_that_are_read_only`.
    """
    return _NO_BYTES.from_buffer(x) if x.flags.writeable else x.ctypes.data


def find(place: Place, codes: np.ndarray) -> np.ndarray | None:
    """`Index.find`, or `None`."""
    functions = _wanted(len(codes))
    if functions is None:
        return None
    codes = np.ascontiguousarray(codes)
    rows = np.empty(len(codes), np.int32)
    data = _start_of(codes), len(codes), _start_of(rows)
    functions.find(place.address, *data, num_threads())
    return rows


def insert(place: Place, rows: np.ndarray, moves: int) -> bool | None:
    """`Index.insert`, or `None`; `moves` are the most that a key may cause."""
    functions = _wanted(len(rows))
    if functions is None:
        return None
    rows = np.ascontiguousarray(rows, np.int32)
    return bool(functions.insert(place.address, _start_of(rows), len(rows), moves))


def replace(
    place: Place,
    rows: np.ndarray,
    free: int,
    codes: np.ndarray,
    step: int,
    hits: np.ndarray,
    moves: int,
) -> bool | None:
    """`Index.replace`, or `None`; `moves` as in `insert`."""
    functions = _wanted(len(rows))
    if functions is None:
        return None
    data = _start_of(rows), len(rows), free, _start_of(codes)
    return bool(functions.replace(place.address, *data, step, _start_of(hits), moves))


def look_up(place: Place, codes: np.ndarray) -> tuple[Any, ...] | None:
    """`Index.look_up`, or `None`."""
    functions = _wanted(len(codes))
    if functions is None:
        return None
    codes, size = np.ascontiguousarray(codes), len(codes)
    rows, touched = np.empty(size, np.int32), np.empty(size, np.int32)
    uses, distinct, number = (np.empty(n, np.int64) for n in (size, size, 1))
    absent, counts, of = np.empty((3, size), np.int64)
    data = _start_of(codes), size, _start_of(rows), num_threads()
    out = map(_start_of, (touched, uses, absent, distinct, counts, of, number))
    count = functions.look_up(place.address, *data, *out)
    if count < 0:
        return None
    first, last = int(number[0]), size - count
    new = distinct.view(np.uint64)[:first], counts[:first], of[:last]
    return rows, touched[:count], uses[:count], absent[:last], new


def touch(
    table: np.ndarray, rows: np.ndarray, step: int, limit: int, old: np.ndarray
) -> bool:
    """Counts keys of rows, if it could.

    Args:
      table: `[N, 2]`, contiguous: that of an index.
      rows: `[n]` int32, rows that there are.
      step: Their last step from now on.
      limit: Rows with more hits are not counted.
      old: Their uses before.
    """
    functions = _wanted(len(rows))
    if functions is None:
        return False
    rows = np.ascontiguousarray(rows)
    data = _start_of(table), _start_of(rows), len(rows)
    functions.touch(*data, step, limit, _start_of(old))
    return True


def lowest(
    table: np.ndarray,
    run: tuple[np.ndarray, np.ndarray],
    by_hits: bool,
    now: int,
    count: int,
) -> tuple[np.ndarray, int] | None:
    """The first rows of a run whose score is as it was, and that were not there `now`.

    Args:
      table: `[N, 2]`, contiguous: that of an index.
      run: Rows, and their scores when it was sorted: `[n]` int32, contiguous.
      by_hits: Whether their hits are the score; else it is the last step.
      now: The step.
      count: How many rows.

    Returns:
      The rows, and how many entries of the run these are with those between them;
      `None` if there are not so many, or one was there.
    """
    functions = _wanted(len(run[0]))
    if functions is None:
        return None
    rows = np.empty(count, np.int32)
    data = map(_start_of, (table, *run))
    last = by_hits, now, count, _start_of(rows)
    stop = functions.lowest(*data, len(run[0]), *last)
    return (rows, stop) if stop else None
