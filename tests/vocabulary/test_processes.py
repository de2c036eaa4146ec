"""Keys that have owners: two processes of a device each are one process of two."""

import sys

import jax
import numpy as np
import pytest

from ..collectives.test_processes import of_process
from ..helpers import vocabulary_worker as worker
from ..helpers.processes import free_port, run_processes
from ..helpers.support import TOLERANCE, assert_close, assert_identical

pytestmark = pytest.mark.slow


def adam_of_a_dictionary():
    """The losses with a vector for each key: in batches, keys go by owner and age."""
    of, last, rows, losses = {}, {}, {}, []
    for step in range(worker.STEPS):
        keys, labels = worker.batch(step)
        owners = dict(zip(keys.tolist(), worker.owner_of(keys).tolist(), strict=True))
        for owner in range(worker.OWNERS):
            batch = [
                key for key in dict.fromkeys(keys.tolist()) if owners[key] == owner
            ]
            held = rows.setdefault(owner, {})
            new = [key for key in batch if key not in held]
            old = [key for key in held if key not in batch]
            old.sort(key=lambda key: (last[key], held[key]))
            room = [i for i in range(1, worker.ROWS_EACH) if i not in held.values()]
            for key, row in zip(new, [*room, *(held[k] for k in old)], strict=False):
                for gone in [k for k in held if held[k] == row]:
                    del held[gone], of[gone]
                held[key], of[key] = row, (0.0, 0.0, 0.0)
            last |= dict.fromkeys(batch, step)
        value = np.array([of[key][0] for key in keys.tolist()]) * worker.WIDTH
        losses.append(np.sum(np.logaddexp(0, value) - labels * value))
        slopes = 1 / (1 + np.exp(-value)) - labels
        for key in dict.fromkeys(keys.tolist()):
            x, mu, nu = of[key]
            grad = slopes[keys == key].sum()
            mu, nu = 0.9 * mu + 0.1 * grad, 0.999 * nu + 0.001 * grad**2
            by = np.sqrt(nu / (1 - 0.999 ** (step + 1))) + 1e-8
            of[key] = x - 0.1 * mu / (1 - 0.9 ** (step + 1)) / by, mu, nu
    return np.array(losses), sum(len({*x}) for x in rows.values()), len(last)


def test_two_processes_are_one(tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        program = [sys.executable, worker.__file__, f"127.0.0.1:{free_port()}", "2"]
        run_processes([[*program, str(process), str(tmp_path)] for process in range(2)])
        parts = [of_process(tmp_path, process) for process in range(2)]
        losses, table, vocabs = worker.train()
    tol = TOLERANCE["float32"].numpy
    for owner, part in enumerate(parts):
        assert_close(part["losses"], losses, tol)
        assert_close(part["table"], table, tol)
        held = {name: part[f"{owner} {name}"] for name in vocabs[owner].arrays}
        assert_identical(held, vocabs[owner].arrays, f"the vocabulary of {owner}")
        assert not any(name.startswith(f"{1 - owner} ") for name in part)
    expected, held, seen = adam_of_a_dictionary()
    assert held == worker.OWNERS * (worker.ROWS_EACH - 1) < seen // 2
    assert_close(losses, expected, tol)
