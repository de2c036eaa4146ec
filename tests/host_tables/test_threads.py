"""Threads that use one trainer: each call comes after the one before."""

import queue
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

from ..helpers.host_tables import (
    assert_trained_alike,
    batches,
    begin,
    host_params,
    loss,
    train_in_memory,
)
from ..helpers.support import assert_identical

pytestmark = pytest.mark.slow

TX = osa.sparse_adam(1e-2)
STEPS = 40


@pytest.fixture
def params(tmp_path):
    return host_params(*begin(), file=tmp_path / "table.bin")


@pytest.fixture
def trainer(params):
    with host.HostTrainer(loss, TX, params) as trainer:
        yield trainer


def in_memory(steps):
    rows, w = begin()
    return train_in_memory(loss, TX, {"table": rows, "w": w}, batches(0, steps))


class Thread(threading.Thread):
    """Calls something until it is told to end; then it raises what was raised."""

    def __init__(self, call):
        super().__init__()
        self.call, self.ends, self.count, self.error = call, threading.Event(), 0, None

    def run(self):
        try:
            while not self.ends.is_set():
                self.call()
                self.count += 1
        except Exception as error:
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.join()
        if self.error is not None:
            raise self.error
        assert self.count


def test_checkpoints_by_another_thread(trainer, params, tmp_path):
    with Thread(lambda: trainer.checkpoint(tmp_path / "run")):
        values = list(trainer.run(batches(0, STEPS)))
        values += [trainer.step(*batch) for batch in batches(STEPS, 2 * STEPS)]
    # Trained on, so that the file holds rows of later steps than the checkpoint.
    values += list(trainer.run(batches(2 * STEPS, 2 * STEPS + 5)))
    assert_trained_alike(trainer, values, in_memory(2 * STEPS + 5))
    trainer.close()
    with host.HostTrainer.restore(tmp_path / "run", loss, TX, params) as restored:
        steps = restored.steps
        assert_trained_alike(restored, values[:steps], in_memory(steps))


@pytest.mark.parametrize("what", ["evaluate", "params", "state"])
def test_another_thread_reads(trainer, what):
    """What it reads is of one step: rows and what has no rows."""
    read = trainer.evaluate(lambda params: params["table"][jnp.arange(5)])
    seen = []
    look = {
        "evaluate": lambda: seen.append(np.asarray(read())),
        "params": lambda: seen.append(np.array(trainer.params["w"])),
        "state": lambda: seen.append(int(trainer.state.count)),
    }
    with Thread(look[what]):
        values = list(trainer.run(batches(0, STEPS)))
    expected = in_memory(STEPS)
    assert_trained_alike(trainer, values, expected)
    last = {
        "evaluate": expected[0]["table"][:5],
        "params": expected[0]["w"],
        "state": STEPS,
    }
    look[what]()
    assert_identical(seen[-1], np.asarray(last[what]))
    if what == "state":
        assert seen == sorted(seen)


def test_two_threads_train(trainer):
    """No step of either is lost."""
    left = list(batches(0, STEPS))

    def train():
        for _ in range(STEPS // 2):
            trainer.step(*left.pop(0))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert not left
    assert trainer.steps == int(trainer.state.count) == STEPS


def test_batches_wait_for_a_thread_that_reads_the_trainer(trainer):
    """As a loader that looks for hard negatives: neither waits for ever."""
    ready = queue.Queue()
    read = trainer.evaluate(lambda params: jnp.sum(params["table"][jnp.arange(5)]))

    def load():
        for batch in batches(0, 10):
            read()
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=load, daemon=True).start()
    values = list(trainer.run(iter(lambda: ready.get(timeout=60), None)))
    assert_trained_alike(trainer, values, in_memory(10))
