"""Row-sparse gradients and optimisers for large embedding tables in JAX."""

from ._adafactor import SparseAdafactorState as SparseAdafactorState
from ._adafactor import sparse_adafactor as sparse_adafactor
from ._apply import apply_updates as apply_updates
from ._collectives import local_rows as local_rows
from ._collectives import lookup_rounds as lookup_rounds
from ._collectives import pmean as pmean
from ._collectives import psum as psum
from ._collectives import psum_scatter as psum_scatter
from ._collectives import sharded_lookup as sharded_lookup
from ._gradients import grad as grad
from ._gradients import value_and_grad as value_and_grad
from ._lazy import lazy as lazy
from ._per_row import per_row as per_row
from ._rows import coalesce as coalesce
from ._rowwise import rowwise_adagrad as rowwise_adagrad
from ._rowwise import rowwise_adam as rowwise_adam
from ._scale_by_rowwise import ScaleByRowwiseAdamState as ScaleByRowwiseAdamState
from ._scale_by_rowwise import ScaleByRowwiseRssState as ScaleByRowwiseRssState
from ._scale_by_rowwise import scale_by_rowwise_adam as scale_by_rowwise_adam
from ._scale_by_rowwise import scale_by_rowwise_rss as scale_by_rowwise_rss
from ._sparse_adam import ScaleBySparseAdamState as ScaleBySparseAdamState
from ._sparse_adam import scale_by_sparse_adam as scale_by_sparse_adam
from ._sparse_adam import sparse_adam as sparse_adam
from ._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from ._stochastic_rounding import stochastic_rounding as stochastic_rounding

__version__ = "0.1.0"
