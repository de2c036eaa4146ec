"""What a sharded training step sends and holds, from its compiled program.

Compiles one step of `sparse_adam` for meshes of CPU devices, ahead of time and for
abstract arrays: nothing of the size of the table is allocated, nothing runs. For each
number of devices it prints what one device holds between the steps (parameters and
optimiser state), what it holds besides during a step, and what it sends in a step.

    python benchmarks/scale.py --devices 8 64 512

The table is split by rows over all devices, the batch by examples; each device has the
same share of the batch, however many devices there are. The forms:

- partitioned: `jax.jit` over sharded arrays; XLA's partitioner chooses.
- all-gather: in `jax.shard_map`, every device sees all ids, and adds up what it has.
- routed: in `jax.shard_map` with `osa.sharded_lookup`; ids and rows travel between who
  asks and who owns. With room for whatever ids there may be, or for one round only,
  which is what ids that are spread evenly take, and what is counted for both.
"""

import argparse
import os
import subprocess
import sys
import time

from hlo_bytes import sent_bytes


def measure(form, devices, rows, width, examples, ids_each):
    """One line of the table."""
    from sharded_steps import compile_step  # imports JAX, which reads the flags

    start = time.perf_counter()
    program = compile_step(form, devices, rows, width, examples, ids_each)
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    # Where a loop does not say how many trips it takes: the blocks of rows (_map_rows)
    # that a whole batch of different ids makes; for the routed form, no round but the
    # first, which stands before the loop.
    rows_in_block = max(1, (1 << 18) // (4 * width))
    blocks = -(-devices * examples * ids_each // rows_in_block)
    loops = blocks if form == "partitioned" else 0
    sent = sent_bytes(program.as_text(), devices, loops=loops)
    return {
        "form": form,
        "devices": devices,
        "state": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "sent": sent,
        "seconds": seconds,
    }


def in_words(size):
    units = ["B", "kB", "MB", "GB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def line(row):
    parts = ", ".join(
        f"{kind} {in_words(n)}" for kind, n in sorted(row["sent"].items())
    )
    cells = [
        row["form"],
        row["devices"],
        in_words(row["state"]),
        in_words(row["temporary"]),
        in_words(sum(row["sent"].values())),
        parts,
        f"{row['seconds']:.0f} s",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = "| form | devices | state | temporary | sent in a step | of it | compiled in |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--forms", nargs="+", help="all by default")
    parser.add_argument("--rows", type=int, default=1_000_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--examples", type=int, default=1024, help="on each device")
    parser.add_argument("--ids", type=int, default=8, help="of each example")
    parser.add_argument("--lines", action="store_true", help="print no head")
    args = parser.parse_args()
    if not args.lines:
        print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
        for devices in args.devices:
            one = ["--lines", "--devices", str(devices)]  # the last ones count
            command = [sys.executable, __file__, *sys.argv[1:], *one]
            subprocess.run(command, check=True)
        return
    # How many devices there are is said before JAX starts.
    (devices,) = args.devices
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " " + flag
    os.environ["JAX_PLATFORMS"] = "cpu"
    from sharded_steps import FORMS

    for form in args.forms or FORMS:
        row = measure(form, devices, args.rows, args.width, args.examples, args.ids)
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
