"""A process that is killed goes on from its checkpoint, to the same bits."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ..helpers import host_worker
from ..helpers.support import WEEKLY, assert_identical, program_environment

pytestmark = pytest.mark.slow


def run(folder, moment, *options):
    root = Path(host_worker.__file__).parents[2]
    command = [sys.executable, "-m", "tests.helpers.host_worker", str(folder)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [*command, str(moment), *options],
        cwd=root,
        env=program_environment() | cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-9 if moment else 0), done.stderr
    if moment:
        return None
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody kills has."""
    folder = tmp_path_factory.mktemp("kill") / "whole"
    folder.mkdir()
    return folder.parent, run(folder, 0)


def test_a_run_that_is_killed_again_and_again(whole):
    parent, expected = whole
    folder = parent / "killed"
    folder.mkdir()
    # A checkpoint is some twenty moments, the steps between two of them some forty.
    for moment in np.random.default_rng(0).integers(5, 90, 10 if WEEKLY else 4):
        run(folder, int(moment))
    assert_identical(run(folder, 0), expected)


def test_without_the_journal_other_numbers_come_out(whole):
    parent, expected = whole
    folder = parent / "without"
    folder.mkdir()
    run(folder, 15, "--no-journal")
    found = run(folder, 0, "--no-journal")
    assert any(np.any(x != y) for x, y in zip(found, expected, strict=True))
