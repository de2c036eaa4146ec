"""A table larger than the memory of the process, trained from files.

    python examples/on_disk.py

The table and the state of its optimiser are files, mapped by NumPy. A step takes the
rows of its batch out of them (`osa.take_rows`), trains these in JAX, and writes them
back (`osa.put_rows`); meanwhile a thread reads the rows of the next batch. The process
forbids itself more memory than a part of the files. The same command with `--resume`
goes on where the files are, with the bits of a run that was never interrupted.

The model is a toy: vectors of 64 numbers whose products should tell whether two ids
have the same sign in a hidden list.
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(f"on_disk.py needs {error.name}, which is not installed; run {install}")

# Not on a terminal: lines of progress now and then.
LINES = {"mininterval": 10, "bar_format": "{l_bar}{bar:10}{r_bar}\n"}
QUIET = {} if sys.stderr.isatty() else LINES

DIM, IDS = 64, 8192  # numbers in a row, lookups in a step
BLOCK = 100_000  # rows that are begun at once


def limit_memory(limit):
    """Forbids the process more memory of its own; pages of files are not counted."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, OSError, ValueError) as error:  # macOS, Windows
        print(f"this system limits no memory: {error}")


def open_files(folder, shapes, mode):
    """A tree of arrays in files, one for each array of `shapes`."""

    def open_file(path, x):
        name = "".join(c if c.isalnum() else "_" for c in jax.tree_util.keystr(path))
        file = Path(folder, f"{name.strip('_')}.npy")
        if mode == "r+":
            return np.load(file, mmap_mode=mode)
        return np.lib.format.open_memmap(file, mode, x.dtype, x.shape)

    return jax.tree_util.tree_map_with_path(open_file, shapes)


def begin(tx, params, state):
    """Random rows, block by block, with the state that `tx.init` gives them."""
    rng = np.random.default_rng(0)
    rows = len(params["table"])
    params["w"][...] = 1
    for first in tqdm(range(0, rows, BLOCK), "new files", **QUIET):
        ids = np.arange(first, min(first + BLOCK, rows))
        new = 0.1 * rng.standard_normal((len(ids), DIM), np.float32)
        tables = {"table": ids, "w": None}
        osa.reset_rows(tx, params, state, tables, {"table": new, "w": None})


def draw(rows, number):
    """The batch of a step: pairs of ids by Zipf's law, and whether they agree."""
    rng = np.random.default_rng(number)
    ids = (float(rows) ** rng.random(IDS)).astype(np.int64) - 1
    ids = ids * 7919 % rows  # frequent rows are not neighbours
    agree = (ids[: IDS // 2] % 5 < 2) == (ids[IDS // 2 :] % 5 < 2)
    return ids.astype(np.int32), np.where(agree, 1, -1).astype(np.float32)


def loss(params, at, labels):
    left, right = params["table"][at].reshape(2, len(labels), DIM)
    return jnp.mean(jnp.logaddexp(0, -labels * ((left * right) @ params["w"])))


class Batch:
    """A batch whose rows are being read, or are there."""

    def __init__(self, tx, files, number):
        self.ids, self.labels = draw(len(files[0]["table"]), number)
        self.rows, self.at = np.unique(self.ids, return_inverse=True)
        # Padding, so that all batches have one shape: out of bounds, written nowhere.
        missing = IDS - len(self.rows)
        rows = np.pad(self.rows, (0, missing), constant_values=len(files[0]["table"]))
        self.tables = {"table": rows, "w": None}
        start = time.perf_counter()
        self.taken = osa.take_rows(tx, *files, self.tables)
        self.seconds = time.perf_counter() - start

    def read_again(self, tx, files, changed):
        """Reads the rows that a step has changed meanwhile, and what all rows share."""
        common = np.intersect1d(self.rows, changed)
        at = np.searchsorted(self.rows, common)
        fresh = osa.take_rows(tx, *files, {"table": common, "w": None})
        self.taken = osa.put_rows(tx, *self.taken, {"table": at, "w": None}, *fresh)


def train(tx, files, steps):
    """Trains from the step that the files are at. Returns losses and seconds."""
    step = osa.make_train_step(loss, tx)
    first, losses, seconds = int(files[1].count), [], []
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        batch = Batch(tx, files, first)
        numbers = range(first + 1, first + 1 + steps)
        for number in tqdm(numbers, "steps", unit="step", **QUIET):
            ahead = reader.submit(Batch, tx, files, number)
            marks = [time.perf_counter()]
            *taken, value = step(*batch.taken, batch.at, batch.labels)
            taken = jax.tree.map(np.asarray, taken)
            marks.append(time.perf_counter())
            osa.put_rows(tx, *files, batch.tables, *taken)
            marks.append(time.perf_counter())
            seconds.append([batch.seconds, *np.diff(marks)])
            losses.append(float(value))
            changed, batch = batch.rows, ahead.result()
            batch.read_again(tx, files, changed)
    return losses, np.array(seconds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rows", type=int, default=2_000_000, help="of the table (default: 2000000)")
    add("--steps", type=int, default=300, help="default: 300")
    add("--folder", type=Path, help="of the files (default: a new one, removed)")
    add("--resume", action="store_true", help="go on with the files of --folder")
    add("--limit", type=float, default=1.0, help="GB of memory (default: 1)")
    args = parser.parse_args()
    if args.resume and not args.folder:
        parser.error("--resume needs the --folder of the files")
    if args.rows < 1000 or args.steps < 1:
        parser.error("--rows must be at least 1000, and --steps at least 1")

    tx = osa.sparse_adam(1e-2)
    limit_memory(int(args.limit * 1e9))
    table = jax.ShapeDtypeStruct((args.rows, DIM), jnp.float32)
    params = {"table": table, "w": jax.ShapeDtypeStruct((DIM,), jnp.float32)}
    shapes = params, jax.eval_shape(tx.init, params)
    with tempfile.TemporaryDirectory() as new:
        folder = Path(args.folder or new)
        folder.mkdir(parents=True, exist_ok=True)
        files = open_files(folder, shapes, "r+" if args.resume else "w+")
        if files[0]["table"].shape != table.shape:
            sys.exit(f"on_disk.py: the files have {len(files[0]['table']):,} rows")
        size = sum(x.nbytes for x in jax.tree.leaves(files))
        print(f"files: {size / 1e9:.1f} GB; memory of the process: {args.limit} GB")
        if not args.resume:
            begin(tx, *files)
        losses, seconds = train(tx, files, args.steps)
        for x in jax.tree.leaves(files):
            x.flush()
    parts = 1e3 * np.median(seconds, axis=0)
    names = ("reading, in a thread", "step", "writing")
    print(", ".join(f"{n} {x:.1f} ms" for n, x in zip(names, parts, strict=True)))
    few = max(1, len(losses) // 10)
    print(f"loss {np.mean(losses[:few]):.4f} -> {np.mean(losses[-few:]):.4f}")
    if args.folder:
        print(f"go on with --resume --folder {args.folder}")


if __name__ == "__main__":
    main()
