"""A stream of keys with two tables in files, pipelined: numbers, kills, a server."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables._archive import read_archive

from ..helpers import stream_worker as worker
from ..helpers.support import WEEKLY, assert_identical, program_environment
from ..helpers.vocabulary import Oracle

pytestmark = pytest.mark.slow


def run(folder, moment):
    root = Path(worker.__file__).parents[2]
    command = [sys.executable, "-m", "tests.helpers.stream_worker", str(folder)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [*command, str(moment)],
        cwd=root,
        env=program_environment() | cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-9 if moment else 0), done.stderr
    return None if moment else json.loads(done.stdout.splitlines()[-1])


def result(folder):
    with np.load(folder / "result.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody kills has."""
    folder = tmp_path_factory.mktemp("stream") / "whole"
    folder.mkdir()
    return folder, run(folder, 0), result(folder)


class Rows:
    """Vectors of keys in a dictionary, float64, and an eviction of their own."""

    def __init__(self, name):
        self.oracle, self.name = Oracle(worker.ROWS[name]), name
        self.vectors, self.sums = {}, {}

    def assign(self, keys, step):
        _, _, gone = self.oracle.assign(keys.ravel().tolist(), step)
        for key in gone:
            del self.vectors[key], self.sums[key]
        for key in np.unique(keys).tolist():
            if key not in self.vectors:
                begin = worker.begins(np.array([key]))[0]
                self.vectors[key] = begin.astype(np.float64)
                self.sums[key] = worker.SUM
        return len(gone)

    def bags(self, keys):
        return np.array(
            [sum(self.vectors[key] for key in bag) for bag in keys.tolist()]
        )

    def update(self, keys, grads):
        """Row-wise Adagrad, of the sum over all places of a key."""
        total = {}
        for bag, grad in zip(keys.tolist(), grads, strict=True):
            for key in bag:
                total[key] = total.get(key, 0) + grad
        for key, grad in total.items():
            self.sums[key] += np.mean(grad**2)
            self.vectors[key] -= worker.RATE * grad / (np.sqrt(self.sums[key]) + 1e-8)


def losses_of_a_dictionary():
    rows, w, sum_of_w = (
        {name: Rows(name) for name in worker.ROWS},
        worker.first_w(),
        worker.SUM,
    )
    w, losses, evicted = w.astype(np.float64), [], 0
    for number in range(worker.STEPS):
        keys, y = worker.batch(number)
        evicted += sum(rows[name].assign(keys[name], number) for name in rows)
        hidden = np.tanh(sum(rows[name].bags(keys[name]) for name in rows))
        logits = hidden @ w
        losses.append(np.mean(np.logaddexp(0, logits) - y * logits))
        slope = (1 / (1 + np.exp(-logits)) - y) / len(y)
        grads = slope[:, None] * w * (1 - hidden**2)
        of_w = slope @ hidden
        for name in rows:
            rows[name].update(keys[name], grads)
        sum_of_w += of_w**2  # of one axis: as in Adagrad
        w -= worker.RATE * of_w / (np.sqrt(sum_of_w) + 1e-8)
    return losses, evicted


def test_losses_are_those_of_a_dictionary_of_vectors(whole):
    _, numbers, found = whole
    losses, evicted = losses_of_a_dictionary()
    assert numbers["evicted"] == evicted > 300
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-6, atol=1e-6)


def test_the_process_stays_within_its_budget(whole):
    """Of two files that it has read as a whole, for the snapshot."""
    _, numbers, _ = whole
    assert numbers["over"] < 0


def test_a_run_that_is_killed_again_and_again(whole):
    """Rows, keys and losses, all from one checkpoint, to the bits."""
    folder = whole[0].parent / "killed"
    folder.mkdir()
    # Between two checkpoints there are some five hundred moments.
    for moment in np.random.default_rng(0).integers(5, 1200, 10 if WEEKLY else 3):
        run(folder, int(moment))
    about, _ = read_archive(folder / "run" / "checkpoint.npz", whole=False)
    assert 4 * worker.EVERY <= about["step"] < worker.STEPS
    run(folder, 0)
    assert_identical(result(folder), whole[2])


def test_a_server_in_another_process_answers_as_evaluate(whole):
    """This process has trained nothing."""
    folder, _, found = whole
    vocabularies = worker.new_vocabularies()
    served = host.Snapshot(folder / "served", worker.declared(), stateful=vocabularies)
    assert served.steps == worker.STEPS
    rows = {
        name: vocab.find(worker.PROBE[:, None]) for name, vocab in vocabularies.items()
    }
    assert np.unique(rows["users"]).size > 10
    answers = served.evaluate(worker.predict)(rows["users"], rows["items"])
    np.testing.assert_allclose(answers, found["answers"], rtol=1e-6, atol=1e-6)
    alone = jnp.tanh(
        served.params["users"][rows["users"][:, 0]]
        + served.params["items"][rows["items"][:, 0]]
    )
    np.testing.assert_allclose(
        alone @ served.params["w"], found["answers"], rtol=1e-5, atol=1e-5
    )
