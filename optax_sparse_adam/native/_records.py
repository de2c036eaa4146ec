"""Records of tables in host memory: taken and put by threads, else by NumPy.

A record is a row of a NumPy array `[N, words]`, which may lie in a file. NumPy takes
and puts one after the other, each of which waits for memory, or for the disk;
`records.h` copies several at once, outside of the interpreter's lock.
"""

import ctypes
import functools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from . import _build, _library

_FEWEST_BYTES = 1 << 16  # with fewer a call of the library takes longer than NumPy


def functions_of(library: Path) -> tuple[Any, Any]:
    """`take_records` and `put_records` of a library."""
    dll = ctypes.CDLL(str(library))
    for function in (dll.take_records, dll.put_records):
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
        function.restype = None
    return dll.take_records, dll.put_records


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    """Those of the library that this process has loaded, if it has."""
    if _build.switched_off():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said where a step asks for the kernel
        library = _library.loaded()
    return None if library is None else functions_of(library)


@functools.cache
def num_threads() -> int:
    """As many as there are cores, one of which the step's own thread leaves free."""
    if hasattr(os, "sched_getaffinity"):
        return max(2, len(os.sched_getaffinity(0)) - 1)
    return max(2, (os.cpu_count() or 1) - 1)


def _copy(
    number: int, table: np.ndarray, rows: np.ndarray, records: np.ndarray
) -> bool:
    """Whether the library has copied `records`, the other operand of both functions."""
    num_bytes = records.nbytes
    if num_bytes < max(1, _FEWEST_BYTES) or not (
        table.flags.c_contiguous
        and records.flags.c_contiguous
        and table.dtype == records.dtype
        and table.shape[1:] == records.shape[1:]
        and rows.shape == records.shape[:1]
    ):
        return False
    functions = _functions()
    if functions is None:
        return False
    rows = np.ascontiguousarray(rows, np.int64)
    if rows.min() < 0 or rows.max() >= len(table):
        return False  # NumPy's own error, or its negative rows
    each = num_bytes // len(rows)
    pointers = (x.ctypes.data for x in (table, rows, records))
    functions[number](*pointers, len(rows), each, num_threads())
    return True


def take(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = table[rows]`.

    Args:
      table: `[N, *record]`.
      rows: `[k]`, integers.
      out: `[k, *record]`, of the type of the table.

    Raises:
      IndexError: For a row that the table does not have.
    """
    if not _copy(0, table, rows, out):
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
    if not (table.flags.writeable and _copy(1, table, rows, records)):
        table[rows] = records
