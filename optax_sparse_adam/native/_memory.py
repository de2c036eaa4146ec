"""Memory that the C library keeps from one step to the next."""

import ctypes
import sys

# Of glibc's malloc.h: where it maps, what it returns, how many heaps threads have. A
# thread's own heap holds 64 MB at most.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_KEPT = (1 << 31) - 1


def keep_memory() -> bool:
    """Keeps freed memory in this process, for the next step to use again.

    A step holds its gradient and its update for a moment. What is above 32 MB glibc
    maps afresh in each step, and Linux clears it page by page, which takes longer than
    the arithmetic: it is so from 65,536 ids of 128 columns on, or from 131,072 of 64.
    Call this once, before the first step; it helps with the kernel and without. The
    process then keeps as much memory as it has ever held for a moment (arrays of 1 GB
    and more excepted), and all of its threads share one heap.

    Returns:
      Whether it took effect: on Linux with glibc. Elsewhere it does nothing.

    Examples:
      >>> import optax_sparse_adam as osa
      >>> keeps = osa.native.keep_memory()
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    options = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: _KEPT, _ARENA_MAX: 1}
    taken = [mallopt(key, value) == 1 for key, value in options.items()]
    return all(taken)
