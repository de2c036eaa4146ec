"""Meshes of eight devices, a training step on them, and what XLA makes of it."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_sparse_adam as osa

from .optimizers import OPTIMIZERS as ALL

MESHES = {(8,): ("x",), (4, 2): ("x", "y"), (2, 2, 2): ("x", "y", "z")}

# Of `lazy`, the norm that clips is one over devices.
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(lambda count: 0.01))
OPTIMIZERS = {name: opt.make(0.01) for name, opt in ALL.items() if name != "exact_adam"}
OPTIMIZERS["lazy"] = osa.lazy(CLIPPED)


class Case(NamedTuple):
    """An optimiser, a mesh, and how the tables and the batch lie on it."""

    optimizer: str
    shape: tuple[int, ...]
    table: P
    batch: P
    axis_type: AxisType = AxisType.Auto

    def __str__(self):
        table = ",".join(map(_name, self.table))
        kind = self.axis_type.name
        return f"{self.optimizer}-{self.shape}-{kind}-[{table}]-{_name(*self.batch)}"

    @property
    def tx(self):
        return OPTIMIZERS[self.optimizer]

    @property
    def mesh(self):
        names = MESHES[self.shape]
        return jax.make_mesh(self.shape, names, (self.axis_type,) * len(names))

    def put(self, x, spec):
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def struct(self, shape, dtype, spec):
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def lookup(self, table, ids):
        """`table[ids]`; over Explicit axes the type of the result has to be said."""
        if self.axis_type is AxisType.Auto:
            return table[ids]
        rows = (*self.batch, *(None,) * ids.ndim)[: ids.ndim]
        return table.at[ids].get(out_sharding=P(*rows, None))


def _name(axes=None):
    return "".join(axes) if axes else "-"


def loss_of(lookup):
    def loss(params, ids):
        rows = lookup(params["table"], ids)
        return jnp.sum(jnp.tanh(rows * params["w"][None, None]) ** 2)

    return loss


def step_of(tx, lookup, out_shardings=None):
    """One step of training, the parameters and the state donated."""

    def step(params, state, ids):
        read = state if isinstance(state, osa.ExactAdamState) else None
        fun = osa.value_and_grad(loss_of(lookup), read=read)
        value, grads = fun(params, ids)
        updates, state = tx.update(grads, state, params)
        return osa.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)


def specs_of(
    tree: Any, shape: tuple[int, int], spec: P, name: str = "table"
) -> list[tuple[Any, P]]:
    """The parts of a tree that belong to a table, and how they are to be sharded."""
    rows, columns = (*spec, None, None)[:2]
    specs = {shape: P(rows, columns), shape[:1]: P(rows), shape[1:]: P(columns)}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (x, specs.get(x.shape, P())) for path, x in leaves if f"'{name}'" in str(path)
    ]


_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|"
    r"collective-broadcast)(?:-start)?\("
)
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def largest_collective(text):
    """Bytes of the largest result of an operation that communicates."""

    def size(kind):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", kind)
        return sum(
            _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in arrays
        )

    return max(map(size, _COLLECTIVE.findall(text)), default=0)


def bytes_on_one_device(arrays: Any) -> int:
    def size(x):
        shape = x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, arrays))
