"""`python -m optax_sparse_adam.native`: compiles the optional library of kernels."""

import argparse
import sys
import time

from . import _gpu, _library


def _remove() -> None:
    libraries = sorted(_library.cache().glob("rows-*.so"))
    for old in libraries:
        old.unlink()
        print(f"Deleted {old}")
    if not libraries:
        print(f"There was none in {_library.cache()}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m optax_sparse_adam.native",
        description="Compiles the optional library, with the kernel for CPUs and what "
        "launches that for GPUs, by the C++ compiler of this machine (CXX, or the "
        "first of c++, g++, clang++), into the user's cache.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--status", action="store_true", help="say whether it is used, and which one"
    )
    choice.add_argument(
        "--remove",
        action="store_true",
        help="delete what this command compiled, older versions included",
    )
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        if args.remove:
            _remove()
        if args.status or args.remove:
            print(_library.status())
            print(_gpu.gpu_status())
            return 0
        library = _library.build()
        _library.register(library)
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Compiled {library} in {time.perf_counter() - start:.1f} s.")
    print(_library.status())
    return 0


if __name__ == "__main__":
    sys.exit(main())
