"""`torch.nn.functional.embedding_bag` by its arguments' names."""

import jax
import jax.numpy as jnp

from .._rows import bags


def embedding_bag(
    input: jax.Array,
    weight: jax.Array,
    offsets: jax.Array | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> jax.Array:
    """`torch.nn.functional.embedding_bag`, by `optax_sparse_adam.embedding_bag`.

    As there, the mode is "mean" if none is given. `sparse` is no argument: under
    `value_and_grad` the gradient of the table is row-sparse, in mode "max" as well.
    Three things differ: an id out of bounds raises in torch, and is padding here;
    `per_sample_weights` may be given in mode "mean", too; and there are no `max_norm`,
    which changes the table while it is read, and `scale_grad_by_freq`.

    Args:
      input: Ids, `[bags, length]`, or `[entries]` with offsets.
      weight: The table, `[num_rows, dim]`.
      offsets: Where each bag begins, `[bags]`; the first is 0.
      mode: "sum", "mean" or "max".
      per_sample_weights: A weight for each id.
      include_last_offset: Whether the last of the offsets is the end of the last bag.
      padding_idx: An id that is padding; from the end of the table, if it is negative.

    Returns:
      `[bags, dim]`.

    Raises:
      TypeError, ValueError: As `optax_sparse_adam.embedding_bag`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_sparse_adam.torch_compat import embedding_bag
      >>> weight = jnp.array([[1.0], [2.0], [4.0]])
      >>> input, offsets = jnp.array([0, 2, 1, 2]), jnp.array([0, 2, 4])
      >>> embedding_bag(input, weight, offsets, include_last_offset=True).tolist()
      [[2.5], [3.0]]
    """
    ids = jnp.asarray(input)
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
        is_inside = jnp.arange(len(ids)) < offsets[-1]
        ids = jnp.where(is_inside, ids, -1)
    pooled = bags.embedding_bag(
        weight, ids, offsets=offsets, weights=per_sample_weights, mode=mode
    )
    return pooled[:-1] if include_last_offset else pooled
