"""Which operations on rows a program uses: asked once for a step, or for a lookup."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax

from .._jax_extras.by_platform import by_platform
from .._jax_extras.sharding import mesh_of
from ..native import _library
from .cuda_kernel import CudaKernel
from .kernel_ops import KernelOps
from .row_ops import RowOps

# For a platform its kernel: a class of `RowOps` with `available()`.
KERNELS: dict[str, Any] = {"cpu": KernelOps, "cuda": CudaKernel}


def kernels_for(
    method: str | None = None, *operands: Any, **flags: Any
) -> tuple[str, ...]:
    """The platforms that have a kernel in this process.

    With a method of `RowOps`, those whose kernel replaces it for these operands, if
    they are on one device.
    """
    there = (name for name, kernel in KERNELS.items() if kernel.available())
    if method is None:
        return tuple(there)
    if not mesh_of(*jax.tree.leaves(operands)).empty:
        return ()
    return tuple(x for x in there if KERNELS[x].replaces(method, *operands, **flags))


def with_ops(
    function: Callable[..., Any],
    *args: Any,
    sums: bool = False,
    maps: bool = False,
    keeps_order: bool = True,
    kernels: tuple[str, ...] | None = None,
    has_rules: bool = False,
) -> Any:
    """`function(ops, *args)`, with the operations of the platform of the program.

    The only fork of what updates or looks up rows, and never nested: by the platform
    that a program is compiled for, and by whether it has a kernel. Under `vmap` and
    differentiation a CPU, too, takes one pass by XLA (see `by_platform`). On a mesh
    there are no kernels.

    Args:
      function: What is done, called for each platform. Outside of a program it is
        compiled, and known by its identity.
      *args: Its trees of arrays.
      sums: Whether it adds entries up.
      maps: Whether it maps a function over rows, which a CPU does in blocks.
      keeps_order: Whether rows have an order that does not depend on `ops`.
      kernels: The platforms whose kernels are asked; by default all that are there.
      has_rules: Whether the caller has rules for `vmap` and derivatives by itself.
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
    there = kernels_for() if kernels is None else kernels
    call = _with_ops if is_traced else _compiled
    return call(function, there, (sums, maps, keeps_order, has_rules), args)


def _with_ops(
    function: Callable[..., Any], there: tuple[str, ...], flags: Any, args: Any
) -> Any:
    sums, maps, keeps_order, has_rules = flags
    # For other platforms, and for `vmap` and derivatives on a CPU.
    default_ops, plain = RowOps("scan" if sums else "search"), RowOps("search")
    bases = {"cpu": plain}
    special_ops: dict[str, RowOps] = {"cpu": replace(plain, in_blocks=maps)}
    if mesh_of(*jax.tree.leaves(args)).empty:
        for platform in there:
            base = special_ops.get(platform, default_ops)
            values = {x.name: getattr(base, x.name) for x in fields(RowOps)}
            special_ops[platform] = KERNELS[platform](**values)

    def of(ops: RowOps) -> Callable[..., Any]:
        return lambda *args: function(ops, *args)

    special = {}
    for platform, ops in special_ops.items():
        base = bases.get(platform, default_ops)
        if ops != default_ops:
            special[platform] = of(ops), None if has_rules or ops == base else of(base)
    only = _only_platform()
    return by_platform(
        special, of(default_ops), *args, keeps_order=keeps_order, only=only
    )


def _only_platform() -> str | None:
    """The one platform that this process compiles for, if that is known.

    Half of a step's tracing is that of other platforms. A process that uses the kernel
    and has CPUs only leaves it out, where nothing asks for it: its programs compile for
    no other platform, as a call of the kernel in them says. With
    `OPTAX_SPARSE_ADAM_NATIVE=0` they do.
    """
    return "cpu" if KERNELS["cpu"].available() and _library.has_cpus_only() else None


_compiled = jax.jit(_with_ops, static_argnums=(0, 1, 2))
