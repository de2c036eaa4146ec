"""Who is measured, part two: torch, where it is installed."""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._contestants import PHASES
from ._environment import num_cores
from ._optimizers import RATE
from ._problem import Batches, Problem, floor_bytes, loss

NAME = "torch SparseAdam"


def load_torch(platform: str) -> tuple[Any, str]:
    """Imports torch, with a thread for each core.

    Returns:
      The module or `None`, and where it runs, or why it does not.
    """
    try:
        torch = importlib.import_module("torch")
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


class TorchContestant:
    """`torch.optim.SparseAdam` with `nn.Embedding(sparse=True)`."""

    name = NAME
    phases: tuple[str, ...] = PHASES

    _embedding: Any
    _optimizer: Any
    _weights: Any
    _ids: list[Any]
    _grads: list[Any]

    def __init__(self, problem: Problem, torch: Any, platform: str) -> None:
        self._problem, self._torch = problem, torch
        self._device = "cuda" if platform == "gpu" else "cpu"
        self._dtype = getattr(torch, problem.dtype)
        row_bytes = problem.dim * self._dtype.itemsize
        # Table and two moments. An update holds the gradient, its coalesced copy and
        # intermediate results of SparseAdam, at most eight times [ids, dim] in all.
        self.memory = (3 * problem.rows + 8 * problem.ids) * row_bytes
        self.stop()

    def start(self, batches: Batches) -> None:
        torch, like = self._torch, {"dtype": self._dtype, "device": self._device}
        rows, dim = self._problem.rows, self._problem.dim
        weight = torch.ones(rows, dim, **like)
        self._embedding = torch.nn.Embedding(rows, dim, sparse=True, _weight=weight)
        self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=RATE)
        self._ids = [
            torch.from_numpy(ids).to(self._device, torch.int64) for ids in batches.ids
        ]
        values = torch.from_numpy(batches.values).to(**like)
        self._weights = torch.from_numpy(batches.weights).to(**like)
        self._grads = [
            torch.sparse_coo_tensor(
                ids[None], values, (rows, dim), check_invariants=False
            )
            for ids in self._ids
        ]
        self._wait()

    def run(self, phase: str, batch: int) -> None:
        if phase == "update":
            self._embedding.weight.grad = self._grads[batch]
        else:
            self._optimizer.zero_grad()
            rows = self._embedding(self._ids[batch])
            softplus = self._torch.nn.functional.softplus
            loss(rows, self._weights, softplus, self._torch.mean).backward()
        self._optimizer.step()
        self._wait()

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def stop(self) -> None:
        self._embedding = self._optimizer = self._weights = None
        self._ids, self._grads = [], []
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def floor(self, touched: int) -> int:
        itemsize = self._dtype.itemsize
        moments = 2 * self._problem.dim * itemsize
        return floor_bytes(self._problem, touched, itemsize, moments)

    def table(self) -> NDArray[Any]:
        return np.asarray(self._embedding.weight.detach().cpu())
