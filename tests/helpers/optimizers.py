"""All optimisers of this package, for the properties that each of them has.

A new one is added here. Its formula is tested in a file of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import optax_sparse_adam as osa


class Optimizer(NamedTuple):
    """How it is made, and what it holds.

    Attributes:
      make: Takes a learning rate, or a schedule.
      state_bytes: Of a table of 1,000,000 x 64 float32.
      rows_are_final: Whether rows of the table hold their values after a step; those of
        exact Adam are brought up to date when they are read.
    """

    make: Callable[[Any], optax.GradientTransformationExtraArgs]
    state_bytes: int
    rows_are_final: bool = True


def _lazy(learning_rate):
    return osa.lazy(
        optax.chain(optax.clip_by_global_norm(9.0), optax.adamw(learning_rate))
    )


def _per_row(learning_rate):
    return osa.lazy(osa.per_row(optax.adam(learning_rate)))


def _exact_adamw(learning_rate):
    return osa.exact_adamw(learning_rate, weight_decay=0.1)


OPTIMIZERS = {
    "sparse_adam": Optimizer(osa.sparse_adam, 512_000_004),
    "lazy": Optimizer(_lazy, 512_000_004),
    "per_row": Optimizer(_per_row, 516_000_000),
    "rowwise_adam": Optimizer(osa.rowwise_adam, 260_000_004),
    "rowwise_adagrad": Optimizer(osa.rowwise_adagrad, 4_000_004),
    "sparse_adafactor": Optimizer(osa.sparse_adafactor, 4_000_260),
    # Four bytes a row beside the
    # moments, twelve with weight decay; and the numbers that all rows share.
    "exact_adam": Optimizer(osa.exact_adam, 516_000_112, rows_are_final=False),
    "exact_adamw": Optimizer(_exact_adamw, 524_000_120, rows_are_final=False),
}
FINAL = {name: opt for name, opt in OPTIMIZERS.items() if opt.rows_are_final}
