"""Operations that `checkify.index_checks` does not enter.

Problem: checkify reports every index out of bounds as an error, also where the mode of
a gather or a scatter defines its meaning; our padding is out of bounds on purpose.
Cause: it has no option to exclude an operation (jax 0.10). Remedy: it enters `jit`,
loops, branches and functions with derivatives of their own, but no function with a
`vmap` of its own (`custom_vmap`). Safe, because that `vmap` is the ordinary one. Test:
`tests/gradients/test_checkify.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .sharding import partitions_of


def unchecked(
    function: Callable[..., Any],
    derivative_of: Callable[..., Any] | None = None,
    *,
    keeps_order: bool = True,
) -> Callable[..., Any]:
    """The same function of arrays, invisible to `checkify`; so is `vmap` of it.

    Its derivatives and `vmap` are those of `derivative_of`, another implementation, if
    given. Where that orders rows differently (`keeps_order=False`), the values beside
    derivatives are computed by it, too. The derivatives are visible: a scatter with
    padding under `jax.grad` reports that.
    """
    other = function if derivative_of is None else derivative_of

    @jax.custom_batching.custom_vmap
    def one(*args: Any) -> Any:
        return function(*args)

    @one.def_vmap
    def many(_: int, in_batched: list[bool], *args: Any) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = unchecked(jax.vmap(other, axes))(*args)
        return out, jax.tree.map(lambda _: True, out)

    call = jax.custom_jvp(one)
    # The primal values come from such a function as well: `vmap` of a `custom_jvp`
    # expects them to have the batch axes of the tangents.
    values = call if keeps_order else unchecked(other)
    call.defjvp(lambda x, dx: (values(*x), jax.jvp(other, x, dx)[1]))
    return call


def show_bounds(
    gather: Callable[..., Any],
    table: Any,
    indices: Sequence[Any],
    params: dict[str, Any],
) -> None:
    """Reads at these indices what nobody uses, for `checkify.index_checks` to check.

    checkify has a rule for a gather and for a dynamic_slice, and sees neither what a
    kernel reads nor that an index has been clamped. A gather without the columns that
    no index names has the same bounds, and XLA drops what is left.
    (tests/gradients/test_checkify.py)
    """
    if (dims := params.get("dimension_numbers")) is not None:
        kept = {*dims.start_index_map, *dims.collapsed_slice_dims}
        kept |= {*dims.operand_batching_dims}
        # JAX gathers an axis that Explicit axes split as a whole only.
        split = partitions_of(jax.typeof(table).sharding.spec)
        sizes = enumerate(params["slice_sizes"])
        columns = [size if axis in kept or split[axis] else 0 for axis, size in sizes]
        params = params | {"slice_sizes": (*columns,)}
    gather(table, *indices, **params)
