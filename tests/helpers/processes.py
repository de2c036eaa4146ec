"""Several processes that are one program: started together, and stopped together."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from .support import program_environment

_SECONDS = 300  # 8 where two cores are free


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_processes(commands, killed=None):
    """Runs all at once; stops all as soon as one fails or the time is over.

    Args:
      commands: Of each process.
      killed: The number of the one that is to kill itself, if any.
    """
    compiler = [x for x in os.environ["XLA_FLAGS"].split() if x.startswith("--xla_cpu")]
    env = program_environment() | {"XLA_FLAGS": " ".join(compiler)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes["cwd"] = Path(__file__).parents[2]
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
    as_expected = finished == [0] * len(commands)
    if killed is not None:  # the others wait for it, or have seen that it is gone
        as_expected = finished[killed] == -signal.SIGKILL
    assert as_expected, f"exit statuses {finished}:\n{output}"
