"""What a process holds: a budget for a large file, and nothing that grows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import host_worker
from ..helpers.support import WEEKLY, program_environment

pytestmark = pytest.mark.slow

HEAD = """
import json, os, sys, threading
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host

def resident():
    # What the system counts, mapping by mapping.
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith("Rss:"))

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def loss(params, ids, y):
    return jnp.mean((params["table"][ids] @ params["w"] - y) ** 2)
"""

BUDGET = (
    HEAD
    + """
BUDGET, ROWS = 2_000_000_000, 26_000_000
table = host.HostTable((ROWS, 64), file="table.bin")
params = {"table": table, "w": jnp.ones(64)}
trainer = host.HostTrainer(loss, osa.sparse_adam(1e-2), params, budget=BUDGET)
rng, most, changed = np.random.default_rng(0), 0, set()
def batches():
    for _ in range(10):
        ids = rng.integers(0, ROWS, 512)
        changed.update(ids[:3].tolist())
        yield ids, np.ones(len(ids), np.float32)
for number, value in enumerate(trainer.run(batches())):
    most = max(most, resident())
# Rows that were never written are read into the page cache as others are. (Few are
# written: a file system that discards takes a millisecond for each when it is removed.)
total = trainer.evaluate(lambda params, ids: params["table"][ids].sum())
for first in range(0, ROWS - 200_000, ROWS // 32):
    total(np.arange(first, first + 200_000))
    most = max(most, resident())
stat = os.stat("table.bin")
known = trainer.params["table"][sorted(changed)]
print(json.dumps({"size": stat.st_size, "on disk": stat.st_blocks * 512, "most": most,
    "trained": bool((known != 0).all()), "steps": trainer.steps}))
trainer.close()
"""
)

ENDURANCE = (
    HEAD
    + """
import hashlib
ROWS = 5000
rng = np.random.default_rng(0)
rows = rng.normal(size=(ROWS, 16)).astype(np.float32)
table = host.HostTable((ROWS, 16), file="table.bin", init=lambda a, b: rows[a:b])
params = {"table": table, "w": jnp.ones(16)}
trainer = host.HostTrainer(loss, osa.sparse_adam(1e-3), params)
kept = np.arange(4, ROWS, 5)  # rows that no batch looks up
def checksum():
    tree = trainer.params["table"][kept], trainer.state.mu["table"][kept]
    return hashlib.sha256(b"".join(x.tobytes() for x in tree)).hexdigest()
def batches(count):
    for _ in range(count):
        ids = rng.integers(0, ROWS // 5, 64) * 5 + rng.integers(0, 4, 64)
        yield ids, np.ones(64, np.float32)
first, seen = checksum(), []
for part in range(20):
    for number, _ in enumerate(trainer.run(batches(STEPS // 20))):
        if number % 250 == 0:
            trainer.checkpoint("run")
    import gc; gc.collect()
    seen.append((resident(), descriptors(), threading.active_count()))
print(json.dumps({"seen": seen, "same": checksum() == first, "steps": trainer.steps,
    "files": sorted(x.name.split("-")[0] for x in Path("run").iterdir())}))
"""
)


def run(code, folder):
    root = str(Path(host_worker.__file__).parents[2])
    environment = program_environment() | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_twenty_gigabytes_in_two(tmp_path):
    found = run(BUDGET, tmp_path)
    (tmp_path / "table.bin").unlink()
    assert found["size"] > 19_900_000_000
    assert found["on disk"] < 1_000_000_000
    assert found["most"] < 2_000_000_000
    assert found["trained"]
    assert found["steps"] == 10


def test_nothing_grows_in_ten_thousand_steps(tmp_path):
    steps = 20_000 if WEEKLY else 10_000
    found = run(f"STEPS = {steps}\n{ENDURANCE}", tmp_path)
    assert found["steps"] == steps
    assert found["same"]
    assert found["files"] == ["checkpoint.npz", "journal"]
    resident, descriptors, threads = zip(*found["seen"], strict=True)
    assert len(set(descriptors)) == 1
    assert max(threads) == min(threads)
    # Flat after the first parts: within 5 MB of some hundred.
    assert max(resident[5:]) - min(resident[5:]) < 5_000_000, resident


SEVERAL_FILES = (
    HEAD
    + """
def loss(params, ids, y):
    logits = params["left"][ids].sum(1) + params["right"][ids].sum(1)
    return jnp.mean((logits * params["w"].sum() - y) ** 2)

ROWS = 200_000  # of 3 kB each with its state: 600 MB in each file
def trainer_of(name, budget=None):
    tables = {x: host.HostTable((ROWS, 256), file=name + x) for x in ("left", "right")}
    params = tables | {"w": jnp.ones(4)}
    return host.HostTrainer(loss, osa.sparse_adam(1e-2), params, budget=budget)

def touch(params):
    # Rows that nobody has written are pages of a hole, and count as others do.
    for name in ("left", "right"):
        for first in range(0, ROWS, 10_000):
            float(params[name][first : first + 10_000].sum())

def steps(trainer, count=3):
    rng = np.random.default_rng(0)
    batches = ((rng.integers(0, ROWS, 4096), np.ones(4096, np.float32))
        for _ in range(count))
    return [float(x) for x in trainer.run(batches)]

unlimited = trainer_of("a")
known = steps(unlimited)
unlimited.close()
unlimited = None
import gc; gc.collect()
alone = resident()
budget = alone + 400_000_000
trainer = trainer_of("b", budget)
other = trainer_of("c")  # a second trainer, whose pages count as well
views = trainer.params, other.params
other.close()
for params in views:
    touch(params)
before = resident()
found = steps(trainer)
print(json.dumps({"over": before - budget, "after": resident() - budget,
    "same": found == known}))
"""
)


def test_several_files_and_trainers_share_a_budget(tmp_path):
    """Two files of each of two trainers, one of them closed; its arrays are held."""
    found = run(SEVERAL_FILES, tmp_path)
    assert found["over"] > 1_000_000_000
    assert found["after"] < 0
    assert found["same"]


def test_a_budget_that_the_process_itself_exceeds(tmp_path):
    """It is refused before a file is made; and by a step, with a number that will do.

    Memory that is taken later is no page of a file.
    """
    code = (
        HEAD
        + """
tx, found = osa.sparse_adam(1e-2), []
table = host.HostTable((10_000, 64), file="table.bin")
params = {"table": table, "w": jnp.ones(64)}
batch = np.arange(9), np.ones(9, np.float32)
try:
    host.HostTrainer(loss, tx, params, budget=1e7)
except MemoryError as error:
    found.append(str(error))
found.append(os.path.exists("table.bin"))
with host.HostTrainer(loss, tx, params, budget=resident() + 5e8) as trainer:
    value = float(trainer.step(*batch))
    trainer.checkpoint("run")
    more = np.ones(600_000_000, np.uint8)
    try:
        trainer.step(*batch)
    except MemoryError as error:
        found.append(str(error))
needed = int(found[-1].split("at least ")[1].split(":")[0].replace(",", ""))
with host.HostTrainer.restore("run", loss, tx, params, budget=needed) as trainer:
    found.append(float(trainer.step(*batch)) < value)
print(json.dumps(found))
"""
    )
    early, is_there, late, goes_on = run(code, tmp_path)
    words = "budget of its HostTrainer, 10,000,000. Give budget= at least"
    assert words in early
    assert not is_there
    assert "without pages of files" in late
    assert goes_on
