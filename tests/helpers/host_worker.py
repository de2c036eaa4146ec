"""A training run that is killed: `python host_worker.py FOLDER MOMENT [--no-journal]`.

It goes on from its checkpoint if there is one, makes a checkpoint every five steps, and
kills itself at the given moment: in the middle of a write of rows, of the journal or of
a checkpoint, or between two of the steps by which a checkpoint comes to be. With the
moment 0 it reaches the end, and writes what it has.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import optax_sparse_adam as osa
from optax_sparse_adam import host_tables as host
from optax_sparse_adam.host_tables import _file, _journal, _ledger
from tests.helpers.host_tables import arrays, batches, begin, host_params, loss

STEPS, EVERY = 40, 5


class Moments:
    """Counts what may be interrupted."""

    def __init__(self, last):
        self.left = last

    def pass_by(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner, name, half=None):
        """Moments before, in the middle of, and after a function."""
        function = getattr(owner, name)

        def interrupted(*args, **kwargs):
            self.pass_by()
            if half is not None and self.left == 1:
                half(function, *args)
            self.pass_by()
            result = function(*args, **kwargs)
            self.pass_by()
            return result

        setattr(owner, name, interrupted)


def half_of_rows(put, self, rows, records):
    put(self, rows[: len(rows) // 2], records[: len(rows) // 2])


def half_of_fields(put_fields, self, rows, arrays):
    half = len(rows) // 2
    put_fields(self, rows[:half], [x[:half] for x in arrays])


def half_of_bytes(write, file, place, data):
    write(file, place, data[: len(data) // 2])


def half_of_file(savez, file, **arrays):
    file.write(b"PK" * 50)
    file.flush()


def interrupt_files(moments):
    moments.around(_file.File, "put", half_of_rows)
    moments.around(_file.File, "put_fields", half_of_fields)
    moments.around(_journal, "write_at", half_of_bytes)
    moments.around(np, "savez", half_of_file)
    moments.around(os, "replace")
    moments.around(_file.File, "set_mark")
    moments.around(_ledger, "Journal")
    moments.around(Path, "unlink")


def main(folder, moment, *options):
    if options:
        _journal.Journal.append = lambda *_: None
    rows, w = begin()
    params = host_params(rows, w, file=folder / "table.bin")
    args = loss, osa.exact_adam(1e-2), params
    if (folder / "run" / "checkpoint.npz").exists():
        trainer = host.HostTrainer.restore(folder / "run", *args)
    else:
        trainer = host.HostTrainer(*args)
        trainer.checkpoint(folder / "run")
    interrupt_files(Moments(moment))
    first = trainer.steps
    for number, _ in enumerate(trainer.run(batches(first, STEPS)), first + 1):
        if number % EVERY == 0:
            trainer.checkpoint(folder / "run")
    with open(folder / "result.npz", "wb") as file:
        leaves = host_leaves(trainer)
        np.savez(file, *leaves)
    trainer.close()


def host_leaves(trainer):
    import jax

    return jax.tree.leaves(arrays((trainer.params, trainer.state)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
