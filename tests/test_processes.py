"""Two processes of two devices each give one process's numbers."""

import contextlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from . import _process_worker as worker
from ._support import TOLERANCE, assert_close, assert_identical, program_environment

_SECONDS = 120  # 8 where two cores are free


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_processes(commands):
    """Runs all at once; stops all as soon as one fails or the time is over."""
    env = program_environment()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, env=env, **pipes))
            stack.callback(process.kill)
            processes.append(process)
        end = time.monotonic() + _SECONDS
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > end:
                break
            time.sleep(0.05)
        finished = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        output = "\n".join(process.communicate()[0] for process in processes)
    assert finished == [0] * len(commands), f"exit statuses {finished}:\n{output}"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the two processes has at the end."""
    folder = tmp_path_factory.mktemp("processes")
    address = f"127.0.0.1:{free_port()}"
    outs = [folder / f"{i}.npz" for i in range(2)]
    program = [sys.executable, worker.__file__, address, "2"]
    run_processes([[*program, str(i), str(out)] for i, out in enumerate(outs)])
    return [dict(np.load(out)) for out in outs]


def of_form(result, form):
    return {k.removeprefix(form): v for k, v in result.items() if k.startswith(form)}


@pytest.mark.parametrize("form", worker.FORMS)
@pytest.mark.parametrize("devices", [4, 1])
def test_two_processes_are_one(results, form, devices):
    expected = worker.train(form, jax.devices()[:devices])
    actual = of_form(results[0], form)
    assert_identical(of_form(results[1], form), actual, "the other process")
    for path, leaf in jax.tree.leaves_with_path(expected):
        name = jax.tree_util.keystr(path)
        if "exact" in name or "count" in name:
            assert_identical(actual.pop(name), leaf, name)
        else:
            # Other orders of sums; and a sum of terms that cancel keeps their rounding.
            tol, largest = TOLERANCE["float32"].numpy, np.abs(leaf).max()
            assert_close(actual.pop(name), leaf, tol, magnitude=largest, what=name)
    assert not actual


def test_a_failing_process_stops_all():
    """Nothing waits for a process that has gone, and its output is shown."""
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    fail = [sys.executable, "-c", "raise SystemExit('this went wrong')"]
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="this went wrong"):
        run_processes([wait, fail])
    assert time.monotonic() - begin < 60
