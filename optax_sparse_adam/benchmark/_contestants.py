"""Who is measured, part one: the protocol, and what runs in JAX."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO
from numpy.typing import NDArray

import optax_sparse_adam as osa

from ._optimizers import RATE, make_optimizer
from ._problem import Batches, Problem, floor_bytes, loss

DENSE = "optax.adam, dense"
PHASES = ("update", "step")


class Contestant(Protocol):
    """One of those that take turns.

    Attributes:
      name: As in the table.
      phases: Which of `PHASES` it takes part in.
      memory: Bytes that it needs while it runs, known before they are taken.
    """

    name: str
    phases: tuple[str, ...]
    memory: int

    def start(self, batches: Batches) -> None:
        """Takes the memory: table, state, batches."""

    def run(self, phase: str, batch: int) -> None:
        """Runs one update or one step, and waits until it is done."""

    def stop(self) -> None:
        """Gives the memory back."""

    def floor(self, touched: int) -> int:
        """Bytes that a run must move."""

    def table(self) -> NDArray[Any]:
        """The table as it is now."""


def _update(tx: Any) -> Callable[..., Any]:
    """From an uncoalesced gradient to the new table: what torch's `step()` does."""

    def update(table: Any, state: Any, ids: Any, values: Any) -> Any:
        grad = BCOO((values, ids[:, None]), shape=table.shape)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state

    return update


def training_step(tx: Any, sparse: bool) -> Callable[..., Any]:
    """Lookup, loss, backward, update, on row-sparse or on dense gradients."""
    value_and_grad = osa.value_and_grad if sparse else jax.value_and_grad

    def model(table: Any, ids: Any, weights: Any) -> Any:
        return loss(table[ids], weights, jax.nn.softplus, jnp.mean)

    def step(table: Any, state: Any, ids: Any, weights: Any) -> Any:
        value, grad = value_and_grad(model)(table, ids, weights)
        updates, state = tx.update(grad, state, table)
        return osa.apply_updates(table, updates), state, value

    return step


def arguments(problem: Problem, tx: Any) -> dict[str, Any]:
    """Shapes and types of what the functions above take, by name."""
    table = jax.ShapeDtypeStruct((problem.rows, problem.dim), problem.dtype)
    return {
        "table": table,
        "state": jax.eval_shape(tx.init, table),
        "ids": jax.ShapeDtypeStruct((problem.ids,), jnp.int32),
        "values": jax.ShapeDtypeStruct((problem.ids, problem.dim), problem.dtype),
        "weights": jax.ShapeDtypeStruct((problem.dim,), problem.dtype),
    }


class JaxContestant:
    """An optimiser of ours, or the dense step of optax; compiled when it is made."""

    _table: Any
    _state: Any
    _ids: list[Any]
    _last: dict[str, Any]

    def __init__(self, name: str, problem: Problem) -> None:
        self.name = name
        sparse = name != DENSE
        self._tx: Any = make_optimizer(name) if sparse else optax.adam(RATE)
        self._problem, self._sparse = problem, sparse
        functions = {"step": (training_step(self._tx, sparse), "weights")}
        if sparse:
            functions["update"] = (_update(self._tx), "values")
        self.phases = tuple(phase for phase in PHASES if phase in functions)
        shapes = arguments(problem, self._tx)
        self._state_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes["state"])
        )
        self._compiled = {}
        for phase, (function, last) in functions.items():
            given = [shapes[key] for key in ("table", "state", "ids", last)]
            jitted = jax.jit(function, donate_argnums=(0, 1))
            self._compiled[phase] = jitted.lower(*given).compile()
        self.memory = max(map(_peak_bytes, self._compiled.values()))
        self.stop()

    def start(self, batches: Batches) -> None:
        dtype = self._problem.dtype
        self._table = jnp.ones((self._problem.rows, self._problem.dim), dtype)
        self._state = self._tx.init(self._table)
        self._ids = [jnp.asarray(ids) for ids in batches.ids]
        self._last = {"step": jnp.asarray(batches.weights, dtype)}
        if "update" in self.phases:
            self._last["update"] = jnp.asarray(batches.values, dtype)
        jax.block_until_ready((self._table, self._state, self._ids, self._last))

    def run(self, phase: str, batch: int) -> None:
        self._table, self._state, *value = self._compiled[phase](
            self._table, self._state, self._ids[batch], self._last[phase]
        )
        jax.block_until_ready((self._table, self._state, value))

    def stop(self) -> None:
        self._table = self._state = None
        self._ids, self._last = [], {}

    def floor(self, touched: int) -> int:
        rows = self._problem.rows
        itemsize = jnp.dtype(self._problem.dtype).itemsize
        return floor_bytes(
            self._problem,
            touched if self._sparse else rows,
            itemsize,
            self._state_bytes / rows,
        )

    def table(self) -> NDArray[Any]:
        return np.asarray(self._table)


def _peak_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes)
