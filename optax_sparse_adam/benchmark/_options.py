"""The command line of the benchmark."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from .._command_line import InputError, Parser, number_type, output_type
from ._optimizers import make_optimizer, optimizer_names
from ._problem import Problem

_DESCRIPTION = """\
Measures optimiser updates and whole training steps (lookup, loss, backward, update) on
one embedding table: the row-sparse optimisers of this package, torch.optim.SparseAdam
where torch is installed, and optax.adam on dense gradients, in turns in one process.
The last column is the time of the bytes that must be moved, at the rate of a copy, over
the time taken. JAX_PLATFORMS=cpu measures on the CPU of a machine with a GPU."""

_EXAMPLE = """\
examples:
  python -m optax_sparse_adam.benchmark
  python -m optax_sparse_adam.benchmark --rows 10000000 --dim 128 --ids 1048576
  python -m optax_sparse_adam.benchmark --sweep --json sweep.json --plot sweep.png
  python -m optax_sparse_adam.benchmark --from sweep.json --plot sweep.svg"""

_ROWS, _DIM, _IDS = 1_000_000, 64, (8_192, 65_536)
_LARGER = Problem(2_000_000, 96, 24_000, "zipf", "float32")
_SWEEP = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000)
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _optimizer(name: str) -> str:
    make_optimizer(name)  # raises
    return name


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
      InputError: If an option is unknown or its value cannot work.
    """
    parser = Parser(
        prog="python -m optax_sparse_adam.benchmark",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def sizes(option: str, default: int, high: int, text: str) -> None:
        parser.add_argument(
            option,
            type=number_type(option, default, 1, high),
            nargs="+",
            metavar="N",
            help=text,
        )

    sizes("--rows", _ROWS, 2 * 10**9, "rows of the table (default: 1,000,000)")
    sizes("--dim", _DIM, 10**5, "length of a row (default: 64)")
    sizes("--ids", _IDS[-1], 10**8, "lookups in a batch (default: 8,192 and 65,536)")
    parser.add_argument(
        "--distribution",
        choices=("zipf", "uniform"),
        nargs="+",
        default=["zipf"],
        metavar="NAME",
        help="of the ids over the rows: zipf, uniform, or both (default: zipf)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        nargs="+",
        default=["float32"],
        metavar="TYPE",
        help=f"of table and moments: {', '.join(_DTYPES)} (default: float32)",
    )
    parser.add_argument(
        "--optimizer",
        type=_optimizer,
        nargs="+",
        default=["sparse_adam"],
        metavar="NAME",
        help=f"{', '.join(optimizer_names())}, or lazy_X or per_row_X with an "
        "optimizer X of optax, such as lazy_adam (default: sparse_adam)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="100,000 to 20,000,000 rows and 65,536 ids, unless --rows or --ids are "
        "given; what does not fit into memory is left out",
    )
    parser.add_argument(
        "--repeats",
        type=number_type("--repeats", 30, 1, 10**6),
        default=30,
        metavar="N",
        help="rounds that count (default: 30); a contestant drops out after 10 seconds "
        "and five rounds",
    )
    parser.add_argument(
        "--dense",
        choices=("auto", "always", "never"),
        default="auto",
        help="measure optax.adam, up to 5 seconds a step, always, or never",
    )
    parser.add_argument(
        "--no-torch", action="store_true", help="leave torch out, even if installed"
    )
    parser.add_argument(
        "--startup",
        action="store_true",
        help="measure import, compilation and the first step as well, in new processes",
    )
    parser.add_argument(
        "--json",
        type=output_type("--json", ".json"),
        metavar="FILE.json",
        help="keep all times",
    )
    parser.add_argument(
        "--plot",
        type=output_type("--plot", ".png", ".pdf", ".svg"),
        metavar="FILE.png",
        help="draw time against rows (.png, .pdf or .svg)",
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE.json",
        help="measure nothing; print and draw what --json has kept",
    )
    args = parser.parse_args(argv)
    if args.source and args.json:
        raise InputError(
            "--from reads what --json has written, got both; leave one of them out"
        )
    return args


def problems(args: argparse.Namespace) -> list[Problem]:
    """All combinations of what was asked for."""
    kinds = list(itertools.product(args.distribution, args.dtype))
    is_default = not (args.rows or args.dim or args.ids or args.sweep)
    rows = args.rows or (_SWEEP if args.sweep else [_ROWS])
    ids = args.ids or (_IDS[-1:] if args.sweep else _IDS)
    found = [
        Problem(*size, *kind)
        for kind in kinds
        for size in itertools.product(rows, args.dim or [_DIM], ids)
    ]
    if is_default:
        larger = _LARGER._asdict()
        found += [
            Problem(**(larger | {"distribution": distribution, "dtype": dtype}))
            for distribution, dtype in kinds
        ]
    return found
