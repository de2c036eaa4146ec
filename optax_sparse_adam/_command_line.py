"""What the programs of this package share: options, errors in one line, tables."""

import argparse
import importlib
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class InputError(Exception):
    """Something that the user passed cannot work; the message is one line for them."""


class Parser(argparse.ArgumentParser):
    """Raises `InputError` where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def number_type(option: str, default: float, low: float, high: float) -> Any:
    """A parser of numbers of the kind of `default`, from `low` to `high`."""
    kind = type(default)
    name = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if low <= value <= high:
            return value
        raise InputError(
            f"{option} must be {name} from {low:,} to {high:,}, got {text!r}; leave it "
            f"out for {default:,}"
        )

    return parse


def output_type(option: str, *suffixes: str) -> Callable[[str], Path]:
    """Finds out now, not after all the work, that a file cannot be written."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise InputError(
                f"{option} must end in {' or '.join(suffixes)}, got {text!r}; choose "
                f"a name such as {path.stem or 'result'}{suffixes[0]}"
            )
        try:
            is_new = not path.exists()
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            raise InputError(
                f"{option} must be a file that can be written, got {text!r} "
                f"({error.strerror}); choose another folder or name"
            ) from None
        return path

    return parse


def need(program: str, module: str) -> Any:
    """Imports a module of the program's extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"the {program} needs {module.partition('.')[0]}, which is not installed; "
            f'run pip install "optax-sparse-adam[{program}]"'
        ) from None


def columns(
    rows: Sequence[Sequence[str]], justify: Callable[..., str], gap: str = "   "
) -> str:
    """Lays out a table; `justify` places the cells right of the first column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = map(justify, rest, widths[1:])
        lines.append(gap.join(["  " + first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Runs a program: its own exit code, or 2 for bad input, 130 for Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A text may hold what the terminal or a pipe cannot encode.
        sys.stdout.reconfigure(errors="replace")
    try:
        return run()
    except (InputError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
