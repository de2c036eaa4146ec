"""Arguments of a loss: which it takes, which are refused, and where they lie."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import valid_jaxtype
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from .._rows.checks import refuse_masked


def _parameters(fun: Callable[..., Any]) -> Mapping[str, Any] | None:
    """Of a function, or `None` of one that Python cannot look into."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None


def split_keywords(
    fun: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that `make_train_step` traces, and those that it does not: see there."""
    parameters = (_parameters(fun) if keywords else None) or {}
    static = {
        name: x
        for name, x in keywords.items()
        if name in parameters and isinstance(parameters[name].default, bool | str)
    }
    return {k: x for k, x in keywords.items() if k not in static}, static


def taken_by(fun: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a function takes; the others are of the optimiser alone."""
    parameters = _parameters(fun) if keywords else {}
    if parameters is None or any(x.kind == x.VAR_KEYWORD for x in parameters.values()):
        return dict(keywords)
    return {k: x for k, x in keywords.items() if k in parameters}


def refuse_untrainable(x: Any, name: str) -> None:
    """Refuses parameters that nobody can train as they are."""
    refuse_masked(x, f"HostTrainer, of parameters ({name}),")
    if isinstance(x, jax.Ref):
        raise TypeError(
            f"HostTrainer trains arrays, numbers and HostTables; {name} is a mutable "
            f"array, `{jax.typeof(x).str_short()}`. Give its value, as in ref[...]; or "
            "let the loss close over it."
        )
    if not (hasattr(x, "dtype") or valid_jaxtype(x)):
        raise TypeError(
            "HostTrainer trains arrays, numbers and HostTables; "
            f"{name} is of the type `{type(x).__name__}`. Let the loss close over it. "
            "With Equinox, split the model by `params, static = eqx.partition(model, "
            "lambda x: isinstance(x, HostTable) or eqx.is_inexact_array(x))`."
        )


def refuse_traced(x: Any, batch: str) -> None:
    """What a program computes; its rows cannot be fetched before it runs."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{batch} has a traced array, {x.aval.str_short()}, and HostTrainer "
            "fetches rows on the host, before a program runs. Call it outside of jit, "
            "vmap, scan and cond; it compiles its step itself."
        )


def refuse_program(results: Any, function: str) -> None:
    """Refuses what is no number yet, as a program is traced around us."""
    for x in jax.tree.leaves(results):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"HostTrainer.{function} was called in a function that JAX traces, as "
                f"by jit, grad or scan, and gets {x.aval.str_short()} there, which is "
                "no number yet. Call it outside; it compiles what it does itself."
            )


def refuse_others(x: Any, batch: str) -> None:
    """What is no array of NumPy or JAX, though it can be made one."""
    refuse_masked(x, f"HostTrainer, in {batch},")
    if isinstance(x, jax.Ref):
        raise TypeError(
            f"{batch} has a mutable array, `{jax.typeof(x).str_short()}`; HostTrainer "
            "takes arrays of NumPy and JAX. Give its value, as in ref[...]; or let the "
            "loss close over it."
        )
    if hasattr(x, "detach"):
        raise TypeError(
            f"{batch} has a {type(x).__module__}.{type(x).__qualname__}; HostTrainer "
            "takes arrays of NumPy and JAX. Give x.numpy(), which shares its memory; "
            "of a loader of torch, give collate_fn= a function that makes tuples of "
            "NumPy arrays."
        )


def check_function(x: Any, needs: str) -> None:
    """Raises, with what is needed in front, if it can not be called."""
    if not callable(x):
        raise TypeError(f"{needs}, got {type(x).__name__}.")


def is_committed(x: Any) -> bool:
    """Whether an array was put on a device, from which JAX does not move it."""
    return isinstance(x, jax.Array) and x.committed


def refuse_other_devices(x: jax.Array, trained_on: Any, batch: str) -> None:
    """JAX moves no array that was put on a device; of a mesh the order counts."""
    here, there = _devices_of(x.sharding), _devices_of(trained_on)
    if here != there:
        raise ValueError(
            f"{batch} has {x.dtype}{list(x.shape)} on {[*map(str, here)]}, and "
            f"HostTrainer trains on {[*map(str, there)]}, where its `mesh` or its "
            "parameters are, or where its first batch was. jax.device_put it there, "
            "as with a NamedSharding of the same mesh; or give an array of NumPy."
        )


def _devices_of(sharding: Any) -> list[Any]:
    if isinstance(sharding, NamedSharding):
        return [*sharding.mesh.devices.flat]
    return [*sharding.device_set]


def refuse_other_numbers(x: Any, batch: str) -> None:
    """JAX takes 2**32 + 5 for 5 where an array of NumPy is wider than its integers."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu":
        return
    held: Any = jax.dtypes.canonicalize_dtype(x.dtype)
    if held.itemsize < x.dtype.itemsize and np.any(x.astype(held) != x):
        number = int(np.asarray(x)[x.astype(held) != x].flat[0])
        raise IndexError(
            f"{batch} has the integer {number}, of which rows are computed, and which "
            f"JAX takes for {np.asarray(number, x.dtype).astype(held)}, as it computes "
            f"in {held} unless jax_enable_x64 is set. Give rows that {held} holds; for "
            f"a hash of numbers that it does not hold, say .astype(np.{held}) first."
        )


def refuse_of_one_process(x: Any, batch: str) -> None:
    """Each process computes the ids of all, so it needs what all of them have."""
    if jax.process_count() > 1 and layout(x) is None:
        raise ValueError(
            f"{batch} has an argument of which rows are computed, and which need not "
            f"be the same in all processes: {x!r}. Give a global array: jax.make_array_"
            "from_process_local_data(sharding, part_of_this_process), or "
            "jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for what all of "
            "them have."
        )


def type_of(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype, and whether the type is weak."""
    aval: Any = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type


def layout(x: Any) -> Any:
    """The sharding of an array on several devices."""
    is_spread = isinstance(x, jax.Array) and len(x.devices()) > 1
    return x.sharding if is_spread else None


def is_over_explicit_axes(x: Any) -> bool:
    """Whether they split an array: then its type says so."""
    of_array: Any = layout(x)
    if not isinstance(of_array, NamedSharding) or of_array.is_fully_replicated:
        return False
    return AxisType.Explicit in of_array.mesh.axis_types


def mesh_around(leaves: Sequence[Any]) -> Any:
    """The mesh that arrays lie on, or that is set, or `None`."""
    for sharding in filter(None, map(layout, leaves)):
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                "HostTrainer takes parameters and batches on one device, or with a "
                f"NamedSharding on a mesh; got {sharding}."
            )
        return sharding.mesh
    return None if jax.sharding.get_mesh().empty else jax.sharding.get_mesh()


def target_of(leaves: Sequence[Any]) -> Any:
    """Where rows go: to all devices of a mesh, or to the device of the parameters."""
    if (mesh := mesh_around(leaves)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    one = next(filter(is_committed, arrays), arrays[0] if arrays else jnp.zeros(()))
    return SingleDeviceSharding(next(iter(one.devices())))


def as_arrays(tree: Any) -> Any:
    """The same without `jit`, where NumPy would compute, in place of the program."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree
    )


def is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def begun(x: Any) -> Any:
    """An array where only its shape, type and devices are told."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jnp.zeros(x.shape, x.dtype, device=x.sharding)
