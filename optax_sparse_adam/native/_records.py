"""Records of tables in host memory: taken and put by threads, else by NumPy.

A record is a row of a NumPy array `[N, words]`, which may lie in a file. NumPy takes
and puts one after the other, each of which waits for memory, or for the disk;
`records.h` copies several at once, outside of the interpreter's lock. What a step works
on are arrays, one for each field of a record: `take_fields` fills all of them in one
pass over the records.
"""

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _library

_FEWEST_BYTES = 1 << 16  # with fewer a call of the library takes longer than NumPy


def functions_of(library: Path) -> tuple[Any, Any]:
    """`take_records` and `put_records` of a library."""
    dll = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for function in (dll.take_records, dll.put_records):
        function.argtypes = [pointer, number, pointer, number, pointer, number, number]
        function.restype = None
    return dll.take_records, dll.put_records


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    return _library.on_the_host(functions_of)


@functools.cache
def num_threads() -> int:
    """As many as there are cores, one of which the step's own thread leaves free."""
    if hasattr(os, "sched_getaffinity"):
        return max(2, len(os.sched_getaffinity(0)) - 1)
    return max(2, (os.cpu_count() or 1) - 1)


def _copy(
    number: int,
    table: np.ndarray,
    rows: np.ndarray,
    arrays: Sequence[np.ndarray],
    offsets: Sequence[int],
) -> bool:
    """Whether the library has copied between records and arrays."""
    num_bytes = table.strides[0] if len(table) else 0
    if len(rows) * num_bytes < max(1, _FEWEST_BYTES) or not table.flags.c_contiguous:
        return False
    functions = _functions()
    if functions is None:
        return False
    rows = np.ascontiguousarray(rows, np.int64)
    if rows.min() < 0 or rows.max() >= len(table):
        return False  # NumPy's own error, or its negative rows
    triples = zip(offsets, arrays, strict=True)
    fields = np.array([(n, x.strides[0], x.ctypes.data) for n, x in triples], np.int64)
    functions[number](
        *(table.ctypes.data, num_bytes, rows.ctypes.data, len(rows)),
        *(fields.ctypes.data, len(fields), num_threads()),
    )
    return True


def _fields(
    table: np.ndarray, arrays: Sequence[np.ndarray], offsets: Sequence[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Parts of all records and arrays, both with one opaque element for each row."""
    for offset, x in zip(offsets, arrays, strict=True):
        if not x.size:
            continue
        field = np.dtype((np.void, x.strides[0]))
        part = np.ndarray(len(table), field, table, offset, table.strides[:1])
        yield part, x.reshape(len(x), -1).view(field)[:, 0]


def take(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = table[rows]`.

    Args:
      table: `[N, *record]`.
      rows: `[k]`, integers.
      out: `[k, *record]`, of the type of the table.

    Raises:
      IndexError: For a row that the table does not have.
    """
    if not (_are_alike(table, rows, out) and _copy(0, table, rows, [out], [0])):
        out[...] = table[rows]


def put(table: np.ndarray, rows: np.ndarray, records: np.ndarray) -> None:
    """`table[rows] = records`, for rows that are distinct.

    Args:
      table: `[N, *record]`, which can be written.
      rows: `[k]`, integers.
      records: `[k, *record]`, of the type of the table.

    Raises:
      IndexError: For a row that the table does not have.
      ValueError: For a table that is read-only.
    """
    is_plain = table.flags.writeable and _are_alike(table, rows, records)
    if not (is_plain and _copy(1, table, rows, [records], [0])):
        table[rows] = records


def _are_alike(table: np.ndarray, rows: np.ndarray, records: np.ndarray) -> bool:
    return (
        records.flags.c_contiguous
        and table.dtype == records.dtype
        and records.shape == (*rows.shape, *table.shape[1:])
    )


def take_fields(
    table: np.ndarray,
    rows: np.ndarray,
    out: Sequence[np.ndarray],
    offsets: Sequence[int],
) -> None:
    """Takes records apart: a part of each into each array.

    Args:
      table: `[N, *record]`, contiguous.
      rows: `[k]`, integers.
      out: Arrays `[k, *field]`, contiguous.
      offsets: Where in a record each of them begins, in bytes.

    Raises:
      IndexError: For a row that the table does not have.
    """
    if not _copy(0, table, rows, out, offsets):
        for part, x in _fields(table, out, offsets):
            x[...] = part[rows]


def put_fields(
    table: np.ndarray,
    rows: np.ndarray,
    arrays: Sequence[np.ndarray],
    offsets: Sequence[int],
) -> None:
    """The inverse of `take_fields`, for rows that are distinct.

    Raises:
      IndexError: For a row that the table does not have.
      ValueError: For a table that is read-only.
    """
    is_writeable = table.flags.writeable
    if not (is_writeable and _copy(1, table, rows, arrays, offsets)):
        for part, x in _fields(table, arrays, offsets):
            part[rows] = x
