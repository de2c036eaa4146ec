"""Memory that the C library keeps from one step to the next."""

import ctypes
import sys

# Of glibc's malloc.h: where it maps, what it returns, how many heaps threads have. A
# thread's own heap holds 64 MB at most.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_KEPT = (1 << 31) - 1


class _Symbol(ctypes.Structure):
    """`Dl_info` of glibc's dlfcn.h: in which library an address lies, and as what."""

    _fields_ = (
        ("library", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_of(process: ctypes.CDLL, name: str) -> bytes | None:
    """The file of the function that programs of this process call by a name."""
    symbol = _Symbol()
    address = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    if not process.dladdr(address, ctypes.byref(symbol)):
        return None
    return bytes(symbol.library)


def keep_memory() -> bool:
    """Keeps freed memory in this process, for the next step to use again.

    A step holds its gradient and its update for a moment. What is above 32 MB glibc
    maps afresh in each step, and Linux clears it page by page, which takes longer than
    the arithmetic: it is so from 65,536 ids of 128 columns on, or from 131,072 of 64.
    (Rows that the kernel looks up, and what takes their place, are in huge pages. A
    model's other arrays are not.)
    Call this once, before the first step; it helps with the kernel and without. The
    process then keeps as much memory as it has ever held for a moment (arrays of 1 GB
    and more excepted), tables that are gone too: programs held up to 22 % more at
    the end, and one that had deleted its tables nine times as much. It is no default.

    It is a setting of the whole process, as `MALLOC_ARENA_MAX=1` in its environment is:
    all threads share one heap, and wait for each other where they allocate memory at
    once. Threads of a data loader that make many small arrays may become slower; let
    them be processes, which have settings of their own.

    Returns:
      Whether it took effect: on Linux with glibc. Elsewhere it does nothing, as it does
      where another allocator (jemalloc, tcmalloc, mimalloc) takes glibc's place: that
      one has settings of its own for what it keeps.

    Examples:
      >>> import optax_sparse_adam as osa
      >>> keeps = osa.native.keep_memory()
    """
    if not sys.platform.startswith("linux"):
        return False
    process = ctypes.CDLL(None)
    # Of musl there is no `mallopt`. An allocator that is preloaded has `malloc`, and
    # perhaps a `mallopt` that does nothing, and says that all is well.
    if not all(hasattr(process, x) for x in ("mallopt", "gnu_get_libc_version")):
        return False
    glibc = _library_of(process, "gnu_get_libc_version")
    if glibc is None or any(
        _library_of(process, x) != glibc for x in ("malloc", "free", "mallopt")
    ):
        return False
    options = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: _KEPT, _ARENA_MAX: 1}
    taken = [process.mallopt(key, value) == 1 for key, value in options.items()]
    return all(taken)
