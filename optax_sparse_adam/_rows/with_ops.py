"""Which operations on rows a program uses: asked once for each table in a step."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax

from .._jax_extras.by_platform import by_platform
from .._jax_extras.sharding import mesh_of
from ..native._on_cpu import only_platform
from .kernel_ops import KernelOps
from .row_ops import RowOps

# For a platform its kernel: a class of `RowOps` with `available()`.
KERNELS: dict[str, Any] = {"cpu": KernelOps}


def with_ops(
    function: Callable[..., Any],
    *args: Any,
    sums: bool = False,
    maps: bool = False,
    keeps_order: bool = True,
) -> Any:
    """`function(ops, *args)`, with the operations of the platform of the program.

    The only fork of what updates rows, and never nested: by the platform that a program
    is compiled for, and by whether it has a kernel. Under `vmap` and differentiation a
    CPU, too, takes one pass by XLA (see `by_platform`). On a mesh there are no kernels.

    Args:
      function: What is done, called for each platform. Outside of a program it is
        compiled, and known by its identity.
      *args: Its trees of arrays.
      sums: Whether it adds entries up.
      maps: Whether it maps a function over rows, which a CPU does in blocks.
      keeps_order: Whether rows have an order that does not depend on `ops`.
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
    there = tuple(name for name, kernel in KERNELS.items() if kernel.available())
    call = _with_ops if is_traced else _compiled
    return call(function, there, (sums, maps, keeps_order), args)


def _with_ops(
    function: Callable[..., Any], there: tuple[str, ...], flags: Any, args: Any
) -> Any:
    sums, maps, keeps_order = flags
    # For other platforms, and for `vmap` and derivatives on a CPU.
    others, plain = RowOps("scan" if sums else "search"), RowOps("search")
    bases = {"cpu": plain}
    own: dict[str, RowOps] = {"cpu": replace(plain, in_blocks=maps)}
    if mesh_of(*jax.tree.leaves(args)).empty:
        for platform in there:
            base = own.get(platform, others)
            values = {x.name: getattr(base, x.name) for x in fields(RowOps)}
            own[platform] = KERNELS[platform](**values)

    def of(ops: RowOps) -> Callable[..., Any]:
        return lambda *args: function(ops, *args)

    special = {}
    for platform, ops in own.items():
        base = bases.get(platform, others)
        if ops != others:
            special[platform] = of(ops), None if ops == base else of(base)
    only = only_platform()
    return by_platform(special, of(others), *args, keeps_order=keeps_order, only=only)


_compiled = jax.jit(_with_ops, static_argnums=(0, 1, 2))
