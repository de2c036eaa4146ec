"""What XLA makes of a step for a GPU and for a TPU, without either.

The compilers come with JAX's plugins, which need no device to compile for one:
`pip install "optax-sparse-adam[compilers]"`. Nothing is run, so nothing is timed.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ..helpers.compiler_program import IDS, MANY, WIDTH, cases, traced
from ..helpers.support import program_environment, slow_but

HEIGHTS = (1_000_000, 8_000_000)


CORE = "sparse_adam", "exact_adamw", "sparse_adafactor", "bfloat16"


@pytest.mark.parametrize("name", slow_but(cases(), *CORE))
def test_lowered_for_a_gpu(name):
    """What JAX hands to the compiler; this needs no plugin."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = traced(cases()[name], 100_000, lambda shape: None)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" not in text
    scatters = re.findall(
        r'"stablehlo.scatter"\([^,]+, [^,]+, (%[\w#]+)\)(.*?)stablehlo.return',
        text,
        re.DOTALL,
    )
    repeated = [rest for _, rest in scatters if "unique_indices = true" not in rest]
    assert len(repeated) == (name == "optax.apply_updates")
    added = [rows for rows, rest in scatters if "= stablehlo." in rest]
    # The updates, but those of bfloat16 before they are rounded.
    assert len(added) == (name != "bfloat16")
    # New rows come from behind a barrier.
    barriers = set(
        re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier", text)
    )
    for rows, _ in scatters:
        assert rows in barriers or rows in added


def compile_for(platform, folder, *heights):
    """The reports on the programs, by optimiser and number of rows."""
    flags = {"XLA_FLAGS": f"--xla_dump_to={folder}"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.helpers.compiler_program",
            platform,
            *map(str, heights),
        ],
        cwd=Path(__file__).parents[2],
        env=program_environment() | flags,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        (name, rows): report
        for name, rows, report in map(json.loads, done.stdout.splitlines())
    }


def check(reports):
    rows_of_values = IDS * WIDTH * 4
    for what, report in reports.items():
        # The sums, the update and both moments of all entries, which one fusion makes;
        # on a mesh also the gradient of all devices.
        operands = 5.25 if "Auto" in what[0] or "Explicit" in what[0] else 4.25
        if what[0].startswith(("lazy, Auto", "lazy, Explicit")):
            # Old rows of the table and of both moments come from all devices at once,
            # and are held beside the new ones until these are sent: on a TPU.
            operands = 7.0
        size = rows_of_values
        if what[0] == "many ids":
            # Gradient, sums, and of a quarter of them the update and both moments.
            operands, size = 2.75, MANY * WIDTH * 4
        assert report["temporary"] < operands * size, what
        assert report["not in place"] <= 1024, what  # padded tuples and numbers
        assert report["copies"] == 0, what
        assert report["loops"] == 0, what
        assert report["scatters"] >= 3, what
        # optax does not say of the rows that it adds that each is there once.
        expected = what[0] == "optax.apply_updates"
        assert report["to one place"] == expected, what
        # The touched rows of all tables that are read.
        assert report["sent at once"] <= 3.25 * rows_of_values, what


@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])),
    reason="JAX is installed without CUDA",
)
def test_gpu(tmp_path):
    reports = compile_for("cuda", tmp_path, *HEIGHTS)
    check(reports)
    for name in {name for name, _ in reports}:
        small, large = (reports[name, rows]["temporary"] for rows in HEIGHTS)
        assert abs(large - small) <= 0.01 * small, name  # buffers are packed anew
    # Additions to one address in an order left to chance are there where optax adds.
    kernels = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    assert len(kernels) > 100
    atomic = [text for text in kernels if re.search(r"\b(atom|red)\.global", text)]
    assert len(atomic) == len(HEIGHTS)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="JAX is installed without libtpu"
)
def test_tpu(tmp_path):
    check(compile_for("tpu", tmp_path, HEIGHTS[-1]))
