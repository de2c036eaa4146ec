"""A table larger than the memory of the process, trained from a file.

    python examples/on_disk.py

The table and the state of its optimiser are one file (`host_tables.HostTable`): a step
reads the rows of its batch, trains these, and writes them back, while a thread reads
the rows of the next batch. The process forbids itself more memory than a part of the
file. The same command with `--resume` goes on from the last checkpoint, with the bits
of a run that was never interrupted, even if this one was killed.

The model is a toy: vectors of 64 numbers whose products should tell whether two ids
have the same sign in a hidden list.
"""

import argparse
import tempfile
from pathlib import Path

try:
    import jax.numpy as jnp
    import numpy as np
    from tqdm import tqdm

    import optax_sparse_adam as osa
    from optax_sparse_adam import host_tables as host
except ImportError as error:
    text = f"on_disk.py needs {error.name}, which is not installed; run "
    raise SystemExit(text + 'pip install ".[examples]"') from None

DIM, IDS = 64, 8192  # numbers in a row, lookups in a step


def limit_memory(limit):
    """Forbids the process more memory of its own; pages of files are not counted."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, OSError, ValueError) as error:  # macOS, Windows
        print(f"this system limits no memory: {error}")


def random_rows(first, last):
    return np.random.default_rng(first).normal(0, 0.1, (last - first, DIM))


def draw(rows, number):
    """The batch of a step: pairs of ids by Zipf's law, and whether they agree."""
    rng = np.random.default_rng(number)
    # Frequent rows are not neighbours.
    ids = ((float(rows) ** rng.random(IDS)).astype(np.int64) - 1) * 7919 % rows
    agree = (ids[: IDS // 2] % 5 < 2) == (ids[IDS // 2 :] % 5 < 2)
    return ids.astype(np.int32), np.where(agree, 1, -1).astype(np.float32)


def loss(params, ids, labels):
    left, right = params["table"][ids].reshape(2, len(labels), DIM)
    return jnp.mean(jnp.logaddexp(0, -labels * ((left * right) @ params["w"])))


def new_trainer(folder, rows, limit, resume=False):
    table = host.HostTable((rows, DIM), file=folder / "table.bin", init=random_rows)
    args = loss, osa.sparse_adam(1e-2), {"table": table, "w": jnp.ones(DIM)}
    if resume:
        return host.HostTrainer.restore(folder / "run", *args, budget=limit)
    return host.HostTrainer(*args, budget=limit, progress=tqdm)


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--rows", type=int, default=2_000_000, help="of the table (default: 2000000)")
    add("--steps", type=int, default=300, help="default: 300")
    add("--folder", type=Path, help="of the files (default: a new one, removed)")
    add("--resume", action="store_true", help="go on with the files of --folder")
    add("--limit", type=float, default=1.0, help="GB of memory (default: 1)")
    args = parser.parse_args()
    if args.rows < 1 or args.steps < 1 or (args.resume and not args.folder):
        parser.error("--rows and --steps are at least 1, and --resume needs --folder")
    limit_memory(limit := int(args.limit * 1e9))
    with tempfile.TemporaryDirectory() as new:
        folder = Path(args.folder or new)
        folder.mkdir(parents=True, exist_ok=True)
        with new_trainer(folder, args.rows, limit, args.resume) as trainer:
            size = (folder / "table.bin").stat().st_size / 1e9
            print(f"file: {size:.1f} GB; memory of the process: {args.limit} GB")
            numbers = range(trainer.steps, trainer.steps + args.steps)
            batches = (draw(args.rows, number) for number in tqdm(numbers))
            losses = [float(value) for value in trainer.run(batches)]
            trainer.checkpoint(folder / "run")
    print(f"loss {np.mean(losses[:30]):.4f} -> {np.mean(losses[-30:]):.4f}")


if __name__ == "__main__":
    main()
