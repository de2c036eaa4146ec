"""Who is measured: our optimisers, the dense step of optax, and torch.

A contestant has a `name`, the `phases` that it takes part in, the `memory` in bytes
that it needs while it runs, and `row_bytes`, those of one row of its table and its
state. `start(batches)` takes that memory, `run(phase, batch)` runs one update or step
and waits until it is done, `stop()` gives the memory back. `table()` is the table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO
from machine import num_cores
from problem import loss

import optax_sparse_adam as osa

DENSE, TORCH = "optax.adam, dense", "torch SparseAdam"
PHASES = ("update", "step")
RATE = 1e-3
BY_HAND = "_by_hand"  # ends the name of an optimiser whose step is not make_train_step


def make_optimizer(name):
    """One of this package, or `lazy_X`: `osa.lazy` of an optimiser X of optax."""
    name = name.removesuffix(BY_HAND)
    if name.startswith("lazy_"):
        return osa.lazy(getattr(optax, name.removeprefix("lazy_"))(RATE))
    return getattr(osa, name)(RATE)


def update_step(tx):
    """From an uncoalesced gradient to the new table: what torch's `step()` does."""

    def update(table, state, ids, values):
        grad = BCOO((values, ids[:, None]), shape=table.shape)
        if hasattr(tx.update, "add_to_params"):  # as a step of `make_train_step`
            return tx.update.add_to_params(grad, state, table)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return update


def training_step(tx, sparse, by_hand):
    """Lookup, loss, backward, update, on row-sparse or on dense gradients."""

    def model(table, ids, weights):
        return loss(table[ids], weights, jax.nn.softplus, jnp.mean)

    def step(table, state, ids, weights):
        value, grad = osa.value_and_grad(model, read=state)(table, ids, weights)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state, value

    if by_hand:
        return step
    return osa.make_train_step(model, tx, sparse=None if sparse else False)


class InJax:
    """An optimiser of ours, or the dense step of optax; compiled when it is made."""

    def __init__(self, name, problem):
        self.name, self.problem, self.sparse = name, problem, name != DENSE
        self.tx = make_optimizer(name) if self.sparse else optax.adam(RATE)
        by_hand = name.endswith(BY_HAND)
        self.phases = PHASES if self.sparse and not by_hand else ("step",)
        functions = {
            "update": update_step(self.tx),
            "step": training_step(self.tx, self.sparse, by_hand),
        }
        table = jax.ShapeDtypeStruct((problem.rows, problem.dim), problem.dtype)
        state = jax.eval_shape(self.tx.init, table)
        ids = jax.ShapeDtypeStruct((problem.ids,), jnp.int32)
        last = {
            "update": jax.ShapeDtypeStruct((problem.ids, problem.dim), problem.dtype),
            "step": jax.ShapeDtypeStruct((problem.dim,), problem.dtype),
        }
        arrays = jax.tree.leaves((table, state))
        self.row_bytes = sum(x.size * x.dtype.itemsize for x in arrays) // problem.rows
        self.compiled = {}
        for phase in self.phases:
            jitted = jax.jit(functions[phase], donate_argnums=(0, 1))
            lowered = jitted.lower(table, state, ids, last[phase])
            self.compiled[phase] = lowered.compile()
        self.memory = max(map(peak_bytes, self.compiled.values()))

    def start(self, batches):
        dtype = self.problem.dtype
        self.now = jnp.ones((self.problem.rows, self.problem.dim), dtype)
        self.state = self.tx.init(self.now)
        self.ids = [jnp.asarray(ids) for ids in batches.ids]
        self.last = {"step": jnp.asarray(batches.weights, dtype)}
        if "update" in self.phases:
            self.last["update"] = jnp.asarray(batches.values, dtype)
        jax.block_until_ready((self.now, self.state, self.ids, self.last))

    def run(self, phase, batch):
        self.now, self.state, *value = self.compiled[phase](
            self.now, self.state, self.ids[batch], self.last[phase]
        )
        jax.block_until_ready((self.now, self.state, value))

    def stop(self):
        self.now = self.state = self.ids = self.last = None

    def table(self):
        return np.asarray(self.now)


def peak_bytes(compiled):
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes)


def load_torch(platform):
    """Torch with a thread for each core, or `None`, and where it runs, or why not."""
    try:
        import torch
    except ImportError:
        return None, "not installed; to compare with it, pip install torch"
    if platform == "cpu":
        torch.set_num_threads(num_cores())
        return torch, f"cpu, {torch.get_num_threads()} threads"
    if platform != "gpu":
        return None, f"not compared: JAX runs on a {platform}"
    if not torch.cuda.is_available():
        return None, "sees no GPU; to compare with it, install its CUDA or ROCm build"
    return torch, f"cuda, {torch.cuda.get_device_name()}"


class InTorch:
    """`torch.optim.SparseAdam` with `nn.Embedding(sparse=True)`."""

    name, phases = TORCH, PHASES

    def __init__(self, problem, torch, platform):
        self.problem, self.torch = problem, torch
        self.device = "cuda" if platform == "gpu" else "cpu"
        self.dtype = getattr(torch, problem.dtype)
        row_bytes = problem.dim * self.dtype.itemsize
        self.row_bytes = 3 * row_bytes  # the table and two moments
        # Table and two moments. An update holds the gradient, its coalesced copy and
        # intermediate results of SparseAdam, at most eight times [ids, dim] in all.
        self.memory = (3 * problem.rows + 8 * problem.ids) * row_bytes

    def start(self, batches):
        torch, like = self.torch, {"dtype": self.dtype, "device": self.device}
        shape = self.problem.rows, self.problem.dim
        weight = torch.ones(shape, **like)
        self.embedding = torch.nn.Embedding(*shape, sparse=True, _weight=weight)
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), lr=RATE)
        self.ids = [
            torch.from_numpy(ids).to(self.device, torch.int64) for ids in batches.ids
        ]
        values = torch.from_numpy(batches.values).to(**like)
        self.weights = torch.from_numpy(batches.weights).to(**like)
        self.grads = [
            torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=False)
            for ids in self.ids
        ]
        self.wait()

    def run(self, phase, batch):
        if phase == "update":
            self.embedding.weight.grad = self.grads[batch]
        else:
            self.optimizer.zero_grad()
            rows = self.embedding(self.ids[batch])
            softplus = self.torch.nn.functional.softplus
            loss(rows, self.weights, softplus, self.torch.mean).backward()
        self.optimizer.step()
        self.wait()

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def stop(self):
        self.embedding = self.optimizer = self.weights = self.ids = self.grads = None
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def table(self):
        return np.asarray(self.embedding.weight.detach().cpu())
