"""A child of `os.fork` finds keys, also where another thread of its parent assigned."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, pickle, signal, sys, threading, time
import numpy as np
import optax_sparse_adam as osa

inside = threading.Event()

def slow(last, hits):
    inside.set()
    time.sleep(0.2)
    return last

keys = np.arange(1, 300)
vocab, other = osa.Vocabulary(300, score=slow), osa.Vocabulary(5)
vocab.assign(keys, 0)
for step in range(1, 4):
    inside.clear()
    new = keys[:20] + 1000 * step
    thread = threading.Thread(target=vocab.assign, args=(new, step))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would wait for ever
        kept = np.count_nonzero(vocab.find(keys))
        held = vocab.arrays
        again = pickle.loads(pickle.dumps(vocab))
        assert (vocab.find(new) > 0).all() and kept == 299 - 20 * step, kept
        assert (again.find(new) == vocab.find(new)).all()
        assert (held["hits"] > 0).sum() == len(vocab) == 299
        assert len(vocab.assign(new + 500, step).fresh) == 20
        vocab.undo()
        assert other.assign([1], 0).rows == 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread.join(60)
    assert len(vocab.assign(new, step).fresh) == 0
print("done")
"""


@pytest.mark.skipif(not hasattr(sys, "abiflags"), reason="needs os.fork")
def test_a_fork_while_a_thread_assigns():
    # JAX warns of forks: it has threads, too, which a child may not need.
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
