"""The kernels of a step, one by one, as JAX's profiler saw them."""

import collections
import gzip
import json
import tempfile
from pathlib import Path

import jax

from gpu_parts.run import compile_all, paths
from gpu_parts.steps import Case, Size, Training, lower

STEPS, LINES = 3, 12


def profile(run):
    large, few = Size(*run.sizes.large), Size(*run.sizes.small[-1])
    in_bags = large._replace(bag=run.sizes.bag)
    what = [("sparse_adam", large), ("sparse_adam", in_bags), ("exact_adam", large)]
    what += [("sparse_adam", few), ("exact_adam", few)]
    cases = [Case(name, "step", size, path) for name, size in what for path in paths()]
    cases = cases[: len(paths())] if run.sizes.is_tiny else cases
    for case, program, *_ in compile_all(run, cases, lower):
        run.attempt(profiled, run, case, program, **case.what())


def profiled(run, case, program):
    training = Training(case, program)
    training.take("zipf")
    for _ in range(2):
        training.call()
    training.wait()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                training.call()
            training.wait()
        run.alive()
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    micros, times = kernels(events)
    total = sum(micros.values()) / STEPS
    number = sum(times.values()) / STEPS
    run.say(f"{case.name}, {case.size}, {case.path}: {total:.1f} us, {number:.0f}")
    lines = [
        [round(of_one / STEPS, 2), times[name] / STEPS, name]
        for name, of_one in micros.most_common(LINES)
    ]
    for of_one, count, name in lines:
        run.say(f"  {of_one:9.1f} us {count:5.1f} x {name}")
    run.record(**case.what(), total_us=round(total, 2), number=number, kernels=lines)


def kernels(events):
    """Microseconds and numbers, by name, of what ran on the streams of a GPU."""
    processes, threads = set(), {}
    for event in [event for event in events if event.get("ph") == "M"]:
        name = event["args"].get("name", "")
        if event["name"] == "process_name" and "GPU" in name:
            processes.add(event["pid"])
        if event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = name
    micros, times = collections.Counter(), collections.Counter()
    for event in events:
        place = event.get("pid"), event.get("tid")
        is_stream = place[0] in processes and "Stream" in threads.get(place, "")
        if event.get("ph") == "X" and is_stream:
            micros[event["name"][:70]] += event["dur"]
            times[event["name"][:70]] += 1
    return micros, times
