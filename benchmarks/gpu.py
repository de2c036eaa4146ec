"""Everything that is measured and checked on a GPU, within ten minutes.

    python benchmarks/gpu.py [--only PARTS] [--quick] [--seconds 500] [--json FILE]
    python benchmarks/gpu.py --fill FILE     the table of docs/gpu.md, from a file

Parts are: device, its speed; checks, the kernel's numbers beside XLA's; update, step,
bags, small, cross, formulas: times by XLA, by the kernel, by torch and by dense optax;
host, tables in host memory; profile, kernel by kernel; tests, those of test_gpu.py.

All but the tests run in one process, which writes its file after each number. If it
dies, hangs or loses its GPU, another one goes on with the next part. Without a GPU, or
with `--tiny`, parts run at tiny sizes, to see that they run: without kernel and tests.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from gpu_parts import FORMAT, table

ROOT = Path(__file__).parents[1]
# Host tables come before torch is there, whose threads take their cores.
PARTS = "device", "host", "update", "step", "bags", "small", "checks", "cross"
PARTS += "profile", "formulas", "tests"
TESTS_SECONDS = 170
LOST = 75  # the exit status of a process that has lost its GPU
SILENCE = 120  # seconds after which a process hangs
TABLE = re.compile(r"(<!-- gpu\.json -->\n).*?(\n<!-- end of gpu\.json -->)", re.S)


def has_gpu():
    """Of NVIDIA, and JAX for it; without starting JAX here."""
    plugins = map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])
    drivers = "/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"
    return any(plugins) and any(map(os.path.exists, drivers))


def commit():
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()
    except OSError:
        return ""


def environment(is_tiny):
    there = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if is_tiny:
        # What is called XLA's is XLA's there, too.
        there |= {"JAX_PLATFORMS": "cpu", "OPTAX_SPARSE_ADAM_NATIVE": "0"}
    return os.environ | ({"JAX_PLATFORMS": "cuda,cpu"} | there)


def run_here(args):
    """The parts one after the other, in the child's process."""
    import jax
    from gpu_parts import checks, device, host, profile, times
    from gpu_parts.run import OutOfTimeError, Run, Sizes

    known = {x.__name__: x for x in (device.device, checks.checks, host.host)}
    known |= times.PARTS | {"profile": profile.profile}
    run = Run(args.json, args.until, Sizes(args.tiny, args.quick))
    if not args.tiny and jax.default_backend() != "gpu":
        raise SystemExit("JAX has no GPU")
    for part in args.only:
        run.begin(part)
        state = "done"
        try:
            run.check_time()
            known[part](run)
        except OutOfTimeError:
            state = "out of time"
        except Exception as error:
            run.failed(error, name=part)
            state = "failed"
        run.end(state)
        if not args.tiny and not run.is_well():
            run.end("the GPU was lost")
            sys.exit(LOST)


def compile_library():
    """The kernel's C++ part, if it is not there: 20 s."""
    command = [sys.executable, "-m", "optax_sparse_adam.native"]
    environment_of_it = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for flags in (["--status"], []):
        done = subprocess.run(
            [*command, *flags],
            env=environment_of_it,
            capture_output=True,
            text=True,
        )
        print(done.stdout + done.stderr[-2000:], flush=True)
        if "Used" in done.stdout:
            return


def run_in_children(args, parts):
    """Starts a process for the parts, and another one for those it has left over."""
    while parts:
        command = [sys.executable, __file__, "--child", "--json", str(args.json)]
        command += ["--until", str(args.until), "--only", *parts]
        command += ["--tiny"] * args.tiny + ["--quick"] * args.quick
        child = subprocess.Popen(command, env=environment(args.tiny))
        why = wait_for(child, args)
        if child.returncode == 0:
            return
        content = read(args.json)
        begun = [x for x in parts if x in content["parts"]]
        content["deaths"].append({"part": begun[-1] if begun else "", "why": why})
        write(args.json, content)
        print(f"\nThe process ended in {begun[-1:]}: {why}", flush=True)
        if not begun:
            return
        parts = [x for x in parts if x not in begun]


def wait_for(child, args):
    """Until it ends, or is silent for too long, or out of time; says why it ended."""
    os.utime(args.json)
    while child.poll() is None:
        time.sleep(0.2)
        now = time.time()
        is_silent = now - args.json.stat().st_mtime > SILENCE
        if is_silent or now > args.until + SILENCE / 4:
            child.kill()
            child.wait()
            return "it was silent for too long" if is_silent else "out of time"
    return f"exit status {child.returncode}"


def run_tests(args):
    """Those of tests/whole/test_gpu.py, in parallel workers, and nothing beside."""
    for selection in ("whole", "core"):
        run_selection(args, selection)


def run_selection(args, selection):
    print(f"\n## tests, {selection}", flush=True)
    began, lines = time.time(), []
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.gpu_selection", selection, "--tb=short"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # First as Ctrl-C, after which pytest still says what failed.
    seconds = max(10.0, min(TESTS_SECONDS, args.end - began))
    ends = [
        threading.Timer(seconds, child.send_signal, [signal.SIGINT]),
        threading.Timer(seconds + 15, os.killpg, [child.pid, signal.SIGKILL]),
    ]
    for timer in ends:
        timer.start()
    for line in child.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    status = child.wait()
    for timer in ends:
        timer.cancel()
    taken = round(time.time() - began, 1)
    counts = re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)\b", lines[-1])
    content = read(args.json)
    before = content.get("tests", {"counts": {}, "seconds": 0, "is_whole": True})
    counts = Counter({kind: int(number) for number, kind in counts})
    content["tests"] = {
        "status": max(status, before.get("status", 0)),
        "seconds": round(before["seconds"] + taken, 1),
        "is_whole": before["is_whole"] and taken < seconds,
        "counts": counts + Counter(before["counts"]),
        "closing": lines[-40:],
    }
    content["parts"]["tests"] = {
        "state": "done",
        "seconds": content["tests"]["seconds"],
    }
    write(args.json, content)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, content):
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def fill(file):
    """Writes the tables of a run into docs/gpu.md, between two comments."""
    page = ROOT / "docs" / "gpu.md"
    text, number = TABLE.subn(
        lambda match: match[1] + table.tables(read(file)) + match[2],
        page.read_text(encoding="utf-8"),
    )
    if number != 1:
        raise SystemExit(f"{page} has {number} places for the table, not one")
    page.write_text(text, encoding="utf-8")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="fewer cases, less long")
    parser.add_argument("--tiny", action="store_true", help="as without a GPU")
    parser.add_argument("--seconds", type=float, default=500, help="for all of it")
    parser.add_argument("--json", type=Path, help="benchmarks/gpu.json")
    parser.add_argument("--commit", help="which one this is, where git does not tell")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print its tables")
    parser.add_argument("--fill", type=Path, metavar="FILE", help="into docs/gpu.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    if args.child:
        return run_here(args)
    if args.table or args.fill:
        if args.fill:
            fill(args.fill)
        print(table.tables(read(args.table or args.fill)))
        return 0
    began, args.tiny = time.time(), args.tiny or not has_gpu()
    if args.json is None:
        folder = Path(tempfile.gettempdir()) if args.tiny else ROOT / "benchmarks"
        args.json = folder / "gpu.json"
    args.end, with_tests = began + args.seconds, "tests" in args.only and not args.tiny
    args.until = args.end - 190 * with_tests
    content = {
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit or commit(),
        "command": [os.path.basename(x) for x in sys.argv[1:]],
        "tiny": args.tiny,
        **{"parts": {}, "deaths": [], "records": []},
    }
    write(args.json, content)
    print(f"numbers go to {args.json}", flush=True)
    if not args.tiny:
        compile_library()
    run_in_children(args, [x for x in PARTS if x in args.only and x != "tests"])
    if with_tests:
        run_tests(args)
    content = read(args.json)
    content["seconds"] = round(time.time() - began, 1)
    write(args.json, content)
    print(f"\n{table.tables(content)}\n\n{content['seconds']} s; {args.json}")
    return report_faults(content)


def report_faults(content):
    """Prints what did not go well, and returns how much that is."""
    bad = [f"{k}: {x['state']}" for k, x in content["parts"].items()]
    bad = [x for x in bad if not x.endswith("done")]
    bad += [f"a process ended: {x['part']}: {x['why']}" for x in content["deaths"]]
    bad += [x["error"][:200] for x in content["records"] if "error" in x]
    bad += [f"check {x}" for x in content["records"] if x.get("ok") is False]
    bad += [f"{x}" for x in content["records"] if x.get("difference", 0) > 1e-3]
    if content.get("tests", {}).get("status", 0):
        bad.append("tests failed")
    print("\n".join(["all parts are well" if not bad else "NOT WELL:", *bad]))
    return len(bad)


if __name__ == "__main__":
    sys.exit(min(1, main() or 0))
