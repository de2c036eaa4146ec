"""The command line of the demo: options, and what is wrong with them, in one line."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .._command_line import InputError, Parser, number_type, output_type

_DESCRIPTION = """\
Trains word vectors (word2vec: skip-gram with negative sampling) with sparse_adam on
row-sparse gradients, on the source files of Python's standard library or on your own
text. The first steps are taken with optax.adam on dense gradients as well, in turns, to
compare time and loss. Ends with the nearest neighbours of some words. Takes about a
minute. Ctrl-C ends the training early; --save then keeps what was learned."""

_EXAMPLE = """\
example:
  python -m optax_sparse_adam.demo --text ~/books --min-count 5 --save vectors.npz"""


def _input(text: str) -> Path:
    path = Path(text)
    if text and path.exists():
        return path
    raise InputError(
        f"--text must be a file or a folder that exists, got {text!r}; leave it out to "
        "learn from Python's standard library"
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      InputError: If an option is unknown or its value cannot work.
    """
    parser = Parser(
        prog="python -m optax_sparse_adam.demo",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def number(option: str, default: float, low: float, high: float, text: str) -> None:
        parser.add_argument(
            option,
            type=number_type(option, default, low, high),
            default=default,
            metavar="N" if isinstance(default, int) else "X",
            help=f"{text} (default: %(default)s)",
        )

    parser.add_argument(
        "--text",
        type=_input,
        metavar="PATH",
        help="file or folder to learn from (default: Python's standard library)",
    )
    number("--steps", 20_000, 1, 10**9, "training steps")
    number("--compare", 500, 1, 10**9, "of these, how many optax.adam takes as well")
    number("--batch", 512, 1, 10**6, "pairs of words in a step")
    number("--dim", 100, 1, 10_000, "length of a vector")
    number("--window", 5, 1, 100, "farthest context of a word, in words")
    number("--negatives", 5, 1, 1000, "noise words for each pair")
    number("--min-count", 2, 1, 10**9, "leave out words that occur less often")
    number("--max-words", 50_000, 10, 10**9, "leave out the rarest words beyond these")
    number("--sample", 1e-3, 1e-9, 1.0, "thin out words of a higher frequency")
    # Adam's usual 0.001 is slow for rows that few batches hold. Held-out loss after
    # 20,000 steps of sparse_adam: 2.62 with 0.001, 2.50 with 0.005, 2.57 with 0.01.
    # optax.adam learns with the same rates.
    number("--learning-rate", 5e-3, 1e-9, 10.0, "rate at first; falls linearly to 5 %%")
    number("--seed", 0, 0, 2**32 - 1, "same seed and machine, same numbers")
    parser.add_argument(
        "--words",
        metavar="A,B",
        help="words to show the neighbours of, separated by commas (default: a dozen)",
    )
    parser.add_argument(
        "--plot",
        type=output_type("--plot", ".png", ".pdf", ".svg"),
        metavar="loss.png",
        help="draw the losses (.png, .pdf or .svg)",
    )
    parser.add_argument(
        "--save",
        type=output_type("--save", ".npz"),
        metavar="vectors.npz",
        help="keep words, counts and both tables",
    )
    return parser.parse_args(argv)
