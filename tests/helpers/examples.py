"""The programs of examples/: loaded as modules, and run as a user runs them."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.append(str(FOLDER))  # examples import what they share by name
# In a training LLVM's optimizations save more time than they take.
_OPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name, *options, cwd, check=True):
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, options)]
    env = os.environ | _OPTIMIZED
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    assert not check or done.returncode == 0, done.stderr
    return done


def interrupt_example(name, *options, cwd, after, seconds=0.0):
    """Presses Ctrl-C some seconds after a line that has `after` in it.

    Python writes a line for each import, and tqdm one for each state of its bar. Checks
    that the program ends at once, and returns all its lines.
    """
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, text=True, cwd=cwd, env=env, **pipes) as process:
        try:
            seen = line = ""
            while not re.search(after, line):
                line = process.stdout.readline()
                assert line, seen
                seen += line
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            seen += process.communicate(timeout=600)[0]
        finally:
            process.kill()
    assert process.returncode == 130, seen
    assert "Traceback" not in seen
    return seen


def assert_one_clear_line(done, *words):
    """A fault of the user's: the exit status is not 0, and one line says what."""
    assert done.returncode not in (0, 130)
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in line, done.stderr
