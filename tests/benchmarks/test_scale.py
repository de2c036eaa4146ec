"""The programs of benchmarks/: bytes counted by hand, and none for the rows."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.support import program_environment

pytestmark = pytest.mark.slow

_FOLDER = Path(__file__).parents[2] / "benchmarks"
DEVICES, WIDTH, EXAMPLES, IDS = 8, 4, 64, 8


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%more (p: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%inner (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %to = f32[8,4]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

%outer (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %all-gather.1 = bf16[8,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8]
  %w = (s32[]) while(%t), body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %r = (f32[8,4]{1,0}, pred[6]{0}) all-reduce(%p, %q), replica_groups={}, to_apply=%add
  %s = s32[2]{0} reduce-scatter(%p), replica_groups={{0,2},{1,3},{4,6},{5,7}}
  %e = f32[16]{0} all-to-all(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, metadata={}
  %e.1 = f32[2]{0} all-to-all(%p), replica_groups=mesh['a'=8] {'a':(2)4}, metadata={}
  %w = (s32[], f32[8,4]{1,0}) while(%t), condition=%more, body=%outer
}
"""


def test_bytes_of_a_program_written_by_hand():
    from hlo_bytes import sent_bytes

    assert sent_bytes(PROGRAM, 8, loops=3) == {
        "all-reduce": 2 * (7 / 8) * (8 * 4 * 4 + 6),
        "reduce-scatter": 2 * 4,  # one of two parts is the other's
        "all-to-all": 3 / 4 * (16 + 2) * 4,
        "all-gather": 3 * 3 / 4 * 8 * 4 * 2,
        "collective-permute": 3 * 5 * 8 * 4 * 4,
    }
    with pytest.raises(ValueError, match=r"Not counted: %e = f32.*ragged-all"):
        sent_bytes(PROGRAM.replace(" all-to-all(", " ragged-all-to-all("), 8)


def by_hand(form):
    """Bytes that a device sends, where the form fixes them."""
    ids, row = EXAMPLES * IDS, WIDTH * 4
    everyone, others = DEVICES, DEVICES - 1
    weights = 2 * others / everyone * row
    if form == "all-gather":
        # The gradients of all rows go everywhere, and before that the ids; what each
        # has for the rows of the others goes to them.
        gathered = others * ids * (row + 4)
        return {
            "all-gather": gathered,
            "reduce-scatter": others * ids * row,
            "all-reduce": weights,
        }
    capacity = ids // everyone + 6 * (ids // everyone) ** 0.5
    exchanged = others * capacity * (row + row + 4)  # rows, their gradients, and ids
    rounds = 2 * others / everyone * 4
    return {"all-to-all": exchanged, "all-reduce": weights + rounds}


@pytest.mark.parametrize("form", ["partitioned", "all-gather", "routed, one round"])
def test_one_device_of_eight(form):
    import scale

    small, large = (
        scale.measure(form, DEVICES, rows, WIDTH, EXAMPLES, IDS)
        for rows in (80_000, 8_000_000)  # more on a device than gradients may hold
    )
    assert small["sent"] == large["sent"]
    assert small["temporary"] == large["temporary"]
    # the table and two moments, the weights and two moments, and the count
    for row, rows in ((small, 80_000), (large, 8_000_000)):
        assert row["state"] == 3 * (rows // DEVICES + 1) * WIDTH * 4 + 4
    if form != "partitioned":
        assert small["sent"] == by_hand(form)


def printed(script, *args):
    """The lines that a program of the folder prints."""
    done = subprocess.run(
        [sys.executable, str(_FOLDER / script), *args],
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_script():
    sizes = ["--rows=800", "--width=4", "--examples=4", "--ids=2"]
    forms = ["--devices", "4", "--forms", "all-gather"]
    head, rule, *lines = printed("scale.py", *sizes, *forms)
    assert {x.count("|") for x in (head, rule, *lines)} == {8}
    assert len(lines) == 1
    assert lines[0].startswith("| all-gather | 4 | 9.65 kB | ")


def test_many_tables():
    pytest.importorskip("torch")
    sizes = ["--tables=2", "--rows=50", "--dim=3", "--ids=4", "--repeats=1"]
    where, *lines = printed("many_tables.py", *sizes)
    assert where.startswith("torch: cpu, ")
    lines = [line for line in lines if "others took" not in line]  # here, they may
    names = "sparse_adam", "lazy(clip, adamw)", "rowwise_adagrad", "optax.adam, dense"
    for name, line in zip((*names, "torch"), lines, strict=True):
        assert line.startswith(name)
        assert " ms a step (" in line
