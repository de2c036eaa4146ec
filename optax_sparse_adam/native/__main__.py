"""`python -m optax_sparse_adam.native`: compiles the optional kernel for CPUs."""

import argparse
import sys
import time

from . import _library


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m optax_sparse_adam.native",
        description="Compiles the optional kernel for CPUs with the C++ compiler of "
        "this machine (CXX, or the first of c++, g++, clang++).",
    )
    parser.add_argument(
        "--remove", action="store_true", help="delete it, older versions included"
    )
    remove = parser.parse_args().remove
    start = time.perf_counter()
    try:
        library = _library.path()
        if remove:
            found = sorted(library.parent.glob("rows-*.so"))
            for old in found:
                old.unlink()
                print(f"Deleted {old}")
            if not found:
                print(f"There was none in {library.parent}")
            return 0
        _library.build()
        _library.register(library)
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Compiled {library} in {time.perf_counter() - start:.1f} s.")
    print("It is used from now on, on CPUs. OPTAX_SPARSE_ADAM_NATIVE=0 turns it off.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
