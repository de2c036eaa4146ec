"""`torch.nn.functional.embedding_bag` by its arguments' names."""

import jax
import jax.numpy as jnp
import numpy as np

from .._rows import bags


def embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    max_norm: None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """`torch.nn.functional.embedding_bag`, by `optax_sparse_adam.embedding_bag`.

    The arguments are torch's, in their order, and the mode is "mean" if none is given.
    What differs: an id out of bounds raises in torch, and is padding here;
    `per_sample_weights` may be given in mode "mean", too; `sparse` has no effect, since
    the gradient of the table is row-sparse under `value_and_grad`, in all modes; and
    `max_norm`, which changes the table while it is read, and `scale_grad_by_freq` are
    refused.

    Args:
      input: Ids, `[bags, length]`, or `[entries]` with offsets.
      weight: The table, `[num_rows, dim]`.
      offsets: Where each bag begins, `[bags]`; the first is 0. Faults raise as in torch
        where the values are known, outside of `jit`; inside, ids before the first
        offset belong to no bag.
      max_norm, scale_grad_by_freq: Refused.
      norm_type, sparse: No effect.
      mode: "sum", "mean" or "max".
      per_sample_weights: A weight for each id.
      include_last_offset: Whether the last of the offsets is the end of the last bag.
      padding_idx: An id that is padding; from the end of the table, if it is negative.

    Returns:
      `[bags, dim]`.

    Raises:
      TypeError, ValueError: As `optax_sparse_adam.embedding_bag`; for options that are
        refused, and for offsets that are out of order or out of bounds.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import embedding_bag
      >>> weight = jnp.array([[1.0], [2.0], [4.0]])
      >>> input, offsets = jnp.array([0, 2, 1, 2]), jnp.array([0, 2, 4])
      >>> embedding_bag(input, weight, offsets, include_last_offset=True).tolist()
      [[2.5], [3.0]]
    """
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError(
            "embedding_bag has no max_norm and no scale_grad_by_freq. Bound norms "
            "of rows in the optimizer (docs/recipes.md); weight ids by "
            "per_sample_weights."
        )
    if offsets is not None and not isinstance(offsets, jax.core.Tracer):
        _check_offsets(np.asarray(offsets), len(input))
    weight, ids = jnp.asarray(weight), bags.as_array(input)
    if jnp.issubdtype(ids.dtype, jnp.integer):
        ids = bags.narrow_ids(ids, len(weight))
    if padding_idx is not None:
        if not -len(weight) <= padding_idx < len(weight):
            raise ValueError(
                f"padding_idx must be a row of the table, got {padding_idx} for "
                f"{len(weight)} rows."
            )
        ids = jnp.where(ids == padding_idx % len(weight), -1, ids)
    if include_last_offset:
        if offsets is None or len(offsets) == 0:
            raise ValueError("include_last_offset needs offsets, got none.")
        # Offsets [0, 2, 4] are two bags. To the core they are three: ids from 4 on
        # become padding, and the third bag is dropped.
        is_inside = jnp.arange(len(ids)) < offsets[-1]
        ids = jnp.where(is_inside, ids, -1)
    pooled = bags.embedding_bag(
        weight, ids, offsets=offsets, weights=per_sample_weights, mode=mode
    )
    return pooled[:-1] if include_last_offset else pooled


def _check_offsets(offsets: np.ndarray, num_ids: int) -> None:
    begins = [0, *offsets.ravel().tolist(), num_ids]
    if len(offsets) and begins[1] != 0:
        raise ValueError(f"offsets[0] must be 0, where the ids begin, got {begins[1]}.")
    if begins != sorted(begins):
        raise ValueError(
            "offsets must be ascending and at most the number of ids, "
            f"{num_ids}, got {begins[1:-1]}."
        )
