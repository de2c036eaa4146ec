"""What a process may hold, pages of mapped files included.

A page of a file that a process has touched counts as its own until the system takes it
back, whoever has mapped the file: another table, another trainer, what is left of one
that was closed while somebody has its arrays, or a snapshot that is served. So the
mappings of the whole process are known here, and all give their pages back. Of a shared
mapping nothing is lost, and changes are included: pages stay in the system's page
cache, and are mapped again when they are touched. Where the system maps whole folios,
each touch of a row may map two megabytes, which it would take back only when memory is
short.
"""

import mmap
import numbers
import os
import threading
import weakref
from typing import Any

_FOLIOS = 1 << 17  # bytes that the touch of a row maps, mostly half as many
_MAPPED = 1 << 26  # bytes that may be mapped between two looks at what is held

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_lock = threading.Lock()


def register(mapping: mmap.mmap) -> None:
    """Counts a mapping from now on, until its last view is gone."""
    with _lock:
        _mappings.add(mapping)


def check_budget(function: str, budget: Any) -> None:
    if not (isinstance(budget, numbers.Real) and float(budget) > 0):  # no NaN
        raise ValueError(
            f"{function} needs a budget that is a number of bytes, as budget=2e9, got "
            f"{budget!r}."
        )


def rows_between_looks(record_bytes: int) -> int:
    """How many rows are touched between two looks at what the process holds."""
    return max(1, _MAPPED // max(_FOLIOS, record_bytes))


def give_back(budget: float) -> int:
    """Gives pages of files back if the process holds nearly its budget.

    Returns:
      What the process holds then.
    """
    held = resident_bytes()
    if held < budget - _MAPPED:
        return held
    with _lock:
        for mapping in _mappings:
            mapping.madvise(mmap.MADV_DONTNEED)
    return resident_bytes()


def keep(budget: float) -> None:
    """The same, before something begins.

    Raises:
      MemoryError: If the process holds more than the budget without pages of files.
    """
    held = give_back(budget)
    if held > budget and _KNOWS_RESIDENT:
        raise MemoryError(
            f"The process holds {held:,} bytes without pages of files, more than the "
            f"budget of its HostTrainer, {budget:,.0f}. Give budget= at least "
            f"{held + 2 * _MAPPED:,}: what it holds, and room for pages "
            "between two looks; or let it hold less, by smaller batches, tables in "
            "files in place of memory, or fewer other arrays."
        )


# macOS says only how much it once was, which is no reason to raise.
_KNOWS_RESIDENT = os.path.exists("/proc/self/statm")


def resident_bytes() -> int:
    """What the process holds, pages of files included: `Rss` of all its mappings.

    The sum of /proc/self/smaps, which takes milliseconds, is kept by the system here.
    """
    if not _KNOWS_RESIDENT:
        import resource  # which Windows lacks, and with it tables in files

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
