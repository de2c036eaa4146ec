"""Programs that hold the kernel for GPUs, used by another process than their maker's.

    python -m tests.helpers.cuda_programs FOLDER make|use exported|cached [cpu]

`make` trains, and leaves what it has compiled in JAX's compilation cache, or exports
the step. `use` trains by that, and has the same bits. With `cpu` XLA for CPUs calls the
handlers, and what they load are libraries (`cuda_handler`).
"""

import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa
from optax_sparse_adam._rows import with_ops
from optax_sparse_adam.native import _cuda

from . import cuda_handler

ROWS, WIDTH, BAGS = 500, 33, (100, 4)


def loss(params, ids):
    bags = osa.embedding_bag(params["bags"], ids)
    return jnp.sum(jnp.sin(bags)) + jnp.sum(jnp.cos(params["rows"][ids[:, 0]]))


def start():
    """A step, and what it begins with."""
    tx, rng = osa.exact_adam(0.1), np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)
        for name in ("bags", "rows")
    }
    ids = jnp.asarray(rng.integers(0, 40, BAGS), jnp.int32)
    return osa.make_train_step(loss, tx), (params, tx.init(params), ids)


def trained(step, params, state, ids):
    for _ in range(3):
        params, state, value = step(params, state, ids)
    return jax.tree.map(np.asarray, jax.tree.leaves((params, state, value)))


def export(folder, step, args):
    # Of leaves, as `serialize` knows no structures but JAX's.
    leaves, tree = jax.tree.flatten(args)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(step(*tree.unflatten(leaves))))
    allowed = jax.export.DisabledSafetyCheck.custom_call(_cuda.TARGET)
    exported = jax.export.export(flat, disabled_checks=[allowed])(*leaves)
    assert f"@{_cuda.TARGET}" in exported.mlir_module()
    (folder / "step").write_bytes(exported.serialize())


def load(folder, args):
    _cuda.compiled = _cuda._compiler = None  # the program has all that it needs
    call = jax.jit(jax.export.deserialize((folder / "step").read_bytes()).call)
    tree = jax.tree.structure((*args[:2], 0))
    return lambda *args: tree.unflatten(call(*jax.tree.leaves(args)))


def watch_cache(folder):
    """Turns the cache on, and returns the list of what will have happened in it."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    return events


def main(folder, what, how, where="gpu"):
    folder, makes = Path(folder), what == "make"
    if where == "cpu":
        cuda_handler.install(folder)
        with_ops.KERNELS["cpu"] = cuda_handler.OnCpu
    else:
        # Makes the handlers known to XLA, which a loaded program needs.
        status = osa.native.gpu_status()
        assert status.startswith("The kernel for GPUs is used"), status
    events = watch_cache(folder) if how == "cached" else []
    step, args = start()
    if how == "exported":
        if makes:
            export(folder, step, args)
            traced = trained(step, *args)
        step = load(folder, args)
    arrays = trained(step, *start()[1])
    numbers = b"".join(x.tobytes() for x in arrays)
    if makes and how == "exported":  # compiled as another program
        for x, y in zip(arrays, traced, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    if makes:
        (folder / "numbers").write_bytes(numbers)
    assert numbers == (folder / "numbers").read_bytes()
    if how == "cached":
        is_in = "/jax/compilation_cache/cache_" + ("misses" if makes else "hits")
        assert set(events) & {is_in}, events
        assert makes or "/jax/compilation_cache/cache_misses" not in events, events
    print("as it should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
