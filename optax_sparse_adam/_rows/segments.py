"""Segments of rows that are no gradient: ids that are sent, or that are written."""

import functools

import jax

from . import duplicates
from .duplicates import Segments
from .row_ops import RowOps
from .with_ops import with_ops


def segment_rows(indices: jax.Array, shape: tuple[int, ...]) -> Segments:
    """`duplicates.segment_rows`, by the method of the platform."""
    method = functools.partial(_segment_rows, shape)
    segments: Segments = with_ops(method, indices, sums=True, kernels=())
    return segments


def sum_segments(segment: jax.Array, data: jax.Array) -> jax.Array:
    """`jax.ops.segment_sum(data, segment, len(segment))`, in a fixed order."""
    sums: jax.Array = with_ops(_sum_segments, segment, data, sums=True, kernels=())
    return sums


def _segment_rows(shape: tuple[int, ...], ops: RowOps, indices: jax.Array) -> Segments:
    return duplicates.segment_rows(indices, shape, is_sorted=False, by=ops.sums)


def _sum_segments(ops: RowOps, segment: jax.Array, data: jax.Array) -> jax.Array:
    args = segment[:, None], data, (len(segment),)
    return duplicates.sum_duplicates(*args, is_sorted=False, by=ops.sums)[1]
