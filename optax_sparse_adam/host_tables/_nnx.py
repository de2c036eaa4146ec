"""`nnx_tables`: a Flax NNX model whose large tables never exist."""

from collections.abc import Callable
from typing import Any

import jax

from ._table import HostTable


def nnx_tables(
    make_model: Callable[[], Any], where: Callable[[Any, Any], HostTable | None]
) -> tuple[Any, Any, Any]:
    """Splits a new NNX model, with tables on the host in place of some parameters.

    Nothing of their size is made: the model is traced, and XLA computes the other
    arrays alone, with the numbers that they have in the whole model.

    Args:
      make_model: Makes the model, as by `lambda: Model(nnx.Rngs(0))`.
      where: `where(path, x)` returns a `HostTable` of the shape and type of the
        parameter `x` (a `jax.ShapeDtypeStruct`), or `None` where it stays on the
        device.

    Returns:
      `(graph, params, rest)` as of `nnx.split(model, nnx.Param, ...)`. The loss gets
      the model by `nnx.merge(graph, params, rest)`. One that changes `rest`, as
      Dropout and BatchNorm do, gets `rest` with the batch, merges it with `copy=True`,
      and returns the new one, `nnx.state(model, nnx.Not(nnx.Param))`, as `aux`.

    Raises:
      ImportError: Without Flax.
      ValueError: If a table has another shape or type than its parameter, or there is
        none.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_sparse_adam as osa
      >>> from optax_sparse_adam import host_tables as host
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(1_000_000, 4, rngs=rngs)
      ...         self.out = nnx.Linear(4, 1, rngs=rngs)
      >>> graph, params, rest = host.nnx_tables(
      ...     lambda: Model(nnx.Rngs(0)),
      ...     lambda path, x: host.HostTable(x.shape) if x.size > 1e6 else None)
      >>> def loss(params, ids):
      ...     model = nnx.merge(graph, params, rest)
      ...     return jnp.mean((model.out(model.embed(ids)) - 1) ** 2)
      >>> trainer = host.HostTrainer(loss, osa.sparse_adam(0.1), params)
      >>> float(trainer.step(jnp.array([3, 900_000])))
      1.0
    """
    from flax import nnx

    treedef: Any
    graph, shapes, *untrained = nnx.split(nnx.eval_shape(make_model), nnx.Param, ...)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    tables: list[HostTable | None] = []
    for path, x in pairs:
        table = where(path, x)
        if table is not None and (table.shape, table.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"`where` gave a table {table.dtype}{list(table.shape)} for "
                f"{jax.tree_util.keystr(path)}, which is {x.dtype}{list(x.shape)}."
            )
        tables.append(table)
    if not any(tables):
        raise ValueError(
            "`where` gave no HostTable for any of the parameters "
            f"{[jax.tree_util.keystr(path) for path, _ in pairs]}."
        )

    @jax.jit
    def small() -> Any:
        _, params, *rest = nnx.split(make_model(), nnx.Param, ...)
        leaves = jax.tree.leaves(params)
        kept = [x for x, y in zip(leaves, tables, strict=True) if y is None]
        return kept, jax.tree.leaves(rest)

    kept, rest = small()
    left = iter(kept)
    params = treedef.unflatten(next(left) if x is None else x for x in tables)
    (untrained,) = jax.tree.unflatten(jax.tree.structure(untrained), rest)
    return graph, params, untrained
