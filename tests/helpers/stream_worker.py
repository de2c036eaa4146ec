"""A stream of keys for two tables in files: `python stream_worker.py FOLDER MOMENT`.

Keys come and go, bags of them are pooled, and a pipeline trains. It goes on from its
checkpoint if there is one, makes a checkpoint of all that it has every 25 steps, and
kills itself at the given moment, as `host_worker`. With the moment 0 it reaches the
end, writes a snapshot, what it predicts, and what the process held at most.
"""

import json
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _file, _journal, _ledger
from optax_sparse_adam.host_tables._budget import resident_bytes

from . import host_worker

STEPS, EVERY = 300, 25
# With a sum to begin with no first step is a sign, which a rounding may turn.
RATE, SUM = 0.002, 1e-3
# Two files of 205 MB. The process takes some 320 MB while it compiles and trains, and
# may take so much: with both files it would be 730.
TABLE_ROWS, DIM, BUDGET = 100_000, 512, 500_000_000
BAGS, SIZES = 16, {"users": 3, "items": 5}
ROWS = {"users": 90, "items": 150}  # of the vocabularies, full after some steps
PROBE = np.arange(250, 330, dtype=np.int64) * 2**40


def loss(params, users, items, y):
    logits = predict(params, users, items)
    return jnp.mean(jnp.logaddexp(0, logits) - y * logits)


def predict(params, users, items):
    left, right = (
        osa.embedding_bag(params[name], ids)
        for name, ids in (("users", users), ("items", items))
    )
    return jnp.tanh(left + right) @ params["w"]


def batch(number):
    """Keys by name, some several times, that drift; and labels."""
    rng = np.random.default_rng(number)
    keys = {
        name: (number + rng.zipf(1.3, (BAGS, size)) % 60).astype(np.int64) * 2**40
        for name, size in SIZES.items()
    }
    return keys, rng.integers(0, 2, BAGS).astype(np.float32)


def begins(keys):
    """What the row of each key begins with, in float32."""
    column = np.arange(DIM)
    return (0.1 * np.sin((keys // 2**40)[:, None] * 0.7 + column)).astype(np.float32)


def first_w():
    return np.linspace(-1, 1, DIM, dtype=np.float32)


def declared(folder=None):
    tables = {
        name: host.HostTable(
            (TABLE_ROWS, DIM), file=None if folder is None else folder / name
        )
        for name in SIZES
    }
    return tables | {"w": jnp.asarray(first_w())}


def new_vocabularies():
    return {name: osa.Vocabulary(rows) for name, rows in ROWS.items()}


def prepare_with(vocabularies, evicted):
    def prepare(step, keys, y):
        rows, ids, values = {}, {"w": None}, {"w": None}
        evicted[step] = 0
        for name, vocab in vocabularies.items():
            rows[name], ids[name], gone = assignment = vocab.assign(keys[name], step)
            values[name] = begins(assignment.fresh_keys)
            evicted[step] += len(gone)
        return host.BatchWithReset((rows["users"], rows["items"], y), ids, values)

    return prepare


class Losses:
    """The history, which a checkpoint has as well."""

    def __init__(self):
        self.values = []

    def arrays_before(self, step):
        return {"values": np.array(self.values[:step], np.float32)}

    def restore(self, arrays):
        self.values = [*arrays["values"]]


class Watch(threading.Thread):
    """What the process holds at most."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0
        self.start()

    def run(self):
        while True:
            self.most = max(self.most, resident_bytes())
            time.sleep(0.002)


def main(folder, moment):
    vocabularies, losses, evicted = new_vocabularies(), Losses(), {}
    stateful = vocabularies | {"losses": losses}
    args = loss, osa.rowwise_adagrad(RATE, SUM), declared(folder)
    options = {"stateful": stateful, "budget": resident_bytes() + BUDGET}
    options["prepare"] = prepare_with(vocabularies, evicted)
    if (folder / "run" / "checkpoint.npz").exists():
        trainer = host.HostTrainer.restore(folder / "run", *args, **options)
    else:
        trainer = host.HostTrainer(*args, **options)
        trainer.checkpoint(folder / "run")
    if moment:
        moments = host_worker.Moments(moment)
        moments.around(_file.File, "put", host_worker.half_of_rows)
        moments.around(_file.File, "put_fields", host_worker.half_of_fields)
        moments.around(_journal, "write_at", host_worker.half_of_bytes)
        moments.around(np, "savez", host_worker.half_of_file)
        moments.around(_file.File, "set_mark")
        moments.around(_ledger, "Journal")
        moments.around(Path, "unlink")
    watch = Watch()
    for value in trainer.run(map(batch, range(trainer.steps, STEPS))):
        losses.values.append(np.float32(value))
        if trainer.steps % EVERY == 0:
            trainer.checkpoint(folder / "run")
    trainer.snapshot(folder / "served")
    rows = {name: vocab.find(PROBE[:, None]) for name, vocab in vocabularies.items()}
    answers = trainer.evaluate(predict)(rows["users"], rows["items"])
    held = {
        f"{name} {key}": x
        for name, vocab in vocabularies.items()
        for key, x in vocab.arrays.items()
    }
    held |= {name: trainer.params[name][: ROWS[name]] for name in ROWS}
    numbers = {"evicted": sum(evicted.values()), "over": watch.most - options["budget"]}
    with open(folder / "result.npz", "wb") as file:
        named = {"losses": losses.values, "answers": answers, "w": trainer.params["w"]}
        np.savez(file, **held, **named)
    print(json.dumps(numbers))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
