"""Gradients and tables on many devices, inside `shard_map` and `pmap`."""

from ._psum_scatter import psum_scatter as psum_scatter
from ._sharded_lookup import lookup_rounds as lookup_rounds
from ._sharded_lookup import sharded_lookup as sharded_lookup
from ._sums import local_rows as local_rows
from ._sums import pmean as pmean
from ._sums import psum as psum
