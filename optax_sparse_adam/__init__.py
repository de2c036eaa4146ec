"""Row-sparse gradients and optimisers for large embedding tables in JAX."""
# ruff: noqa: I001  # in groups, not in the order of the alphabet

# Gradients.
from ._gradients.value_and_grad import grad as grad
from ._gradients.value_and_grad import value_and_grad as value_and_grad

# Training and evaluation.
from ._gradients.evaluate import evaluate as evaluate
from ._train_step import make_train_step as make_train_step

# Rows as things.
from ._row_verbs import put_rows as put_rows
from ._row_verbs import reset_rows as reset_rows
from ._row_verbs import take_rows as take_rows
from ._rows_of import rows_of as rows_of

# Keys in place of rows.
from ._vocabulary.codes import hash_keys as hash_keys
from ._vocabulary.vocabulary import Vocabulary as Vocabulary

# Lookups of bags, and beside frozen rows.
from ._rows.bags import embedding_bag as embedding_bag
from ._rows.frozen_lookup import frozen_lookup as frozen_lookup

# Row-sparse arrays.
from ._rows.apply_updates import apply_updates as apply_updates
from ._rows.coalesce import coalesce as coalesce
from ._rows.gradient_stats import GradientStats as GradientStats
from ._rows.gradient_stats import gradient_stats as gradient_stats

# Optimisers.
from ._optimizers.sparse_adam import ScaleBySparseAdamState as ScaleBySparseAdamState
from ._optimizers.sparse_adam import scale_by_sparse_adam as scale_by_sparse_adam
from ._optimizers.sparse_adam import sparse_adam as sparse_adam
from ._exact_adam.optimizer import exact_adam as exact_adam
from ._exact_adam.optimizer import exact_adamw as exact_adamw
from ._exact_adam.flush import flush as flush
from ._exact_adam.state import ExactAdamState as ExactAdamState
from ._optimizers.sparse_adafactor import SparseAdafactorState as SparseAdafactorState
from ._optimizers.sparse_adafactor import sparse_adafactor as sparse_adafactor
from ._optimizers.rowwise import ScaleByRowwiseAdamState as ScaleByRowwiseAdamState
from ._optimizers.rowwise import ScaleByRowwiseRssState as ScaleByRowwiseRssState
from ._optimizers.rowwise import rowwise_adagrad as rowwise_adagrad
from ._optimizers.rowwise import rowwise_adam as rowwise_adam
from ._optimizers.rowwise import scale_by_rowwise_adam as scale_by_rowwise_adam
from ._optimizers.rowwise import scale_by_rowwise_rss as scale_by_rowwise_rss

# Wrappers of optax's transformations.
from ._optimizers.lazy import lazy as lazy
from ._optimizers.per_row import per_row as per_row
from ._optimizers.stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
)
from ._optimizers.stochastic_rounding import stochastic_rounding as stochastic_rounding

# Many devices.
from ._collectives.psum import local_rows as local_rows
from ._collectives.psum import pmean as pmean
from ._collectives.psum import psum as psum
from ._collectives.psum_scatter import psum_scatter as psum_scatter
from ._collectives.sharded_lookup import lookup_rounds as lookup_rounds
from ._collectives.sharded_lookup import sharded_lookup as sharded_lookup

__version__ = "0.1.0"
