"""The parts of the benchmark: who, on what, in which order; what is said."""

import collections
import functools
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from optax_sparse_adam.benchmark import _environment, _measure, _report
from optax_sparse_adam.benchmark._contestants import DENSE, JaxContestant
from optax_sparse_adam.benchmark._measure import Turns, groups
from optax_sparse_adam.benchmark._optimizers import make_optimizer, optimizer_names
from optax_sparse_adam.benchmark._options import parse_args, problems
from optax_sparse_adam.benchmark._problem import Problem, draw, floor_bytes
from optax_sparse_adam.benchmark._results import Measurement, Result, Run
from optax_sparse_adam.benchmark._torch import NAME as TORCH
from optax_sparse_adam.benchmark._torch import TorchContestant, load_torch

from ..helpers.support import TOLERANCE, Magnitude


@pytest.fixture(autouse=True)
def default_promotion():
    """`optax.adam`, which is measured as well, promotes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def without_rest(monkeypatch):
    monkeypatch.setattr(_measure, "_REST_SECONDS", 0)


# --- who is measured ---

PROBLEM = Problem(300, 8, 64, "zipf", "float32")


@functools.cache
def compiled(name, problem=PROBLEM):
    return JaxContestant(name, problem)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_compute_the_same(dtype):
    """The guard of the benchmark: ours and torch's table agree after the same turns."""
    problem = PROBLEM._replace(dtype=dtype)
    batches = draw(problem)
    with jax.enable_x64(dtype == "float64"):
        ours = compiled("sparse_adam", problem)
        theirs = TorchContestant(problem, torch, "cpu")
        turns = Turns([ours, theirs], batches)
        turns.run(repeats=4)
    assert {len(seconds) for seconds in turns.seconds.values()} == {4}
    table = Magnitude(1.0)  # the table began with ones
    table.check(ours.table(), theirs.table(), TOLERANCE[dtype].torch, what="table")
    # 24 steps of at most 0.001 or so, in the rows of the batches and no others.
    moved = np.abs(ours.table() - 1).max(axis=1)
    assert set(np.flatnonzero(moved)) == set(np.concatenate(batches.ids).tolist())
    assert 0.005 < moved.max() < 0.02
    turns.stop()


def test_the_dense_step_is_adam_on_a_dense_gradient():
    batches, dense = draw(PROBLEM), compiled(DENSE)
    assert dense.phases == ("step",)
    dense.start(batches)
    embedding = torch.nn.Embedding(300, 8, _weight=torch.ones(300, 8))
    adam = torch.optim.Adam(embedding.parameters(), lr=1e-3)
    weights = torch.from_numpy(batches.weights)
    for number in range(3):
        dense.run("step", number)
        adam.zero_grad()
        rows = embedding(torch.from_numpy(batches.ids[number]))
        torch.nn.functional.softplus(rows @ weights).mean().backward()
        adam.step()
    expected = embedding.weight.detach().numpy()
    assert np.abs(expected - 1).max() > 2e-3
    # One step is 1e-3 of gradient over root; both come from sums in another order.
    np.testing.assert_allclose(dense.table(), expected, rtol=0, atol=1e-6)
    dense.stop()


def test_memory_and_floor():
    row, ids, rows = 8 * 4, PROBLEM.ids, PROBLEM.rows
    ours, dense = compiled("sparse_adam"), compiled(DENSE)
    theirs = TorchContestant(PROBLEM, torch, "cpu")
    for contestant in (ours, theirs, dense):
        assert 3 * rows * row < contestant.memory < (6 * rows + 20 * ids) * row
    # p, m and v of 40 rows read and written, the rows of the batch read.
    floor = (6 * 40 + ids) * row
    assert floor_bytes(PROBLEM, 40, 4, state_row_bytes=2 * row) == floor
    assert theirs.floor(40) == floor
    assert 0 <= ours.floor(40) - floor <= 2 * 4  # the step count as well
    assert dense.floor(40) == (6 * rows + ids) * row + 2 * 4


def test_optimizers():
    names = optimizer_names()
    assert {"sparse_adam", "rowwise_adam", "sparse_adafactor"} <= set(names)
    table = jnp.ones((5, 2))
    for name in [*names, "lazy_adam", "lazy_adamw", "per_row_adam"]:
        make_optimizer(name).init(table)
    count = make_optimizer("per_row_adam").init(table)[0].count
    assert count.shape == (5,)


def test_where_torch_runs(monkeypatch):
    threads = torch.get_num_threads()
    try:
        module, place = load_torch("cpu")
        assert module is torch
        cores = _environment.num_cores()
        assert place == f"cpu, {cores} threads"
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_torch("gpu") == (
        None,
        "sees no GPU; to compare with it, install its CUDA or ROCm build",
    )
    assert load_torch("tpu")[0] is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert load_torch("cpu")[0] is None


# --- what they are measured on ---


def test_draws():
    zipf = draw(Problem(10**5, 4, 2000, "zipf", "float32"))
    again = draw(Problem(10**5, 4, 2000, "zipf", "float32"))
    uniform = draw(Problem(10**5, 4, 2000, "uniform", "float32"))
    np.testing.assert_array_equal(zipf.ids, again.ids)
    assert not np.array_equal(zipf.ids[0], zipf.ids[1])
    for batches in (zipf, uniform):
        assert np.min(batches.ids) >= 0
        assert np.max(batches.ids) < 10**5
        unique = [len(set(ids.tolist())) for ids in batches.ids]
        assert abs(batches.touched - np.mean(unique)) <= 0.5
        assert batches.values.shape == (2000, 4)
    # The chance of rank r is log(1 + 1/r) / log(R); that of any row 1/R.
    chance = np.log1p(1 / np.arange(1, 10**5)) / math.log(10**5)
    for batches, p in ((zipf, chance), (uniform, np.full(10**5, 1e-5))):
        expected = np.sum(1 - (1 - p) ** 2000)
        assert abs(batches.touched - expected) < 0.03 * expected
    counts = np.sort(np.bincount(np.concatenate(zipf.ids)))[::-1]
    assert abs(counts[0] / 16_000 - chance[0]) < 0.01
    assert abs(np.argmax(np.bincount(np.concatenate(zipf.ids)))) > 0  # not by rank
    assert draw(Problem(1, 1, 5, "zipf", "float32")).touched == 1


def test_problems():
    def sizes(options):
        return [str(problem) for problem in problems(parse_args(options.split()))]

    assert sizes("") == [
        "1,000,000 x 64 float32, 8,192 zipf ids",
        "1,000,000 x 64 float32, 65,536 zipf ids",
        "2,000,000 x 96 float32, 24,000 zipf ids",
    ]
    assert sizes("--rows 10000000 --dim 128 --ids 1048576 --dtype bfloat16") == [
        "10,000,000 x 128 bfloat16, 1,048,576 zipf ids"
    ]
    swept = problems(parse_args(["--sweep"]))
    assert (swept[0].rows, swept[-1].rows) == (100_000, 20_000_000)
    assert {(p.dim, p.ids) for p in swept} == {(64, 65_536)}
    both = sizes("--rows 10 20 --ids 3 4 --distribution uniform zipf")
    assert len(set(both)) == 8
    assert len(sizes("--distribution uniform zipf")) == 6


# --- the turns ---


class Fake:
    """Takes no time and writes down what it is asked to do."""

    phases = ("update", "step")

    def __init__(self, name, memory=0, log=None, fails=None):
        self.name, self.memory, self.fails = name, memory, fails
        self.log = [] if log is None else log

    def start(self, batches):
        self.log.append((self.name, "start"))

    def run(self, phase, batch):
        self.log.append((self.name, phase, batch))
        if self.fails == (phase, batch):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore lines")

    def stop(self):
        self.log.append((self.name, "stop"))


def test_turns_alternate():
    log = []
    turns = Turns([Fake("a", log=log), Fake("b", log=log)], None)
    turns.run(repeats=3)
    turns.stop()
    assert log[:2] == [("a", "start"), ("b", "start")]
    assert log[-2:] == [("a", "stop"), ("b", "stop")]
    rounds = [log[2 + i : 10 + i] for i in range(0, len(log) - 4, 8)]
    assert len(rounds) == 2 + 3
    order = iter(("ba", "ab", "ab", "ba", "ba"))
    for number, one in enumerate(rounds, -2):
        first, second = next(order)
        assert one == [
            (name, phase, (number + shift + before) % 8)
            for phase, shift in (("update", 0), ("step", 4))
            for name in (first, second)
            for before in (-1, 0)  # the run before is not timed
        ]
    assert all(len(seconds) == 3 for seconds in turns.seconds.values())


def test_nobody_always_comes_after_the_same():
    log = []
    group = [Fake(name, log=log) for name in "abc"]
    Turns(group, None).run(repeats=21)
    names = [name for name, what, *_ in log if what in ("update", "step")]
    pairs = list(itertools.pairwise(names))
    for name in "abc":
        before = collections.Counter(one for one, other in pairs if other == name)
        assert all(before[other] > 10 for other in "abc" if other != name), before


def test_who_runs_out_of_memory_leaves():
    failing, other = Fake("a", fails=("step", 6)), Fake("b")
    turns = Turns([failing, other], None)
    turns.run(repeats=4)
    assert turns.skipped == {"a": "RESOURCE_EXHAUSTED: out of memory"}
    assert failing.log[-1] == ("a", "stop")
    assert len(turns.seconds["step", "a"]) == 2
    assert len(turns.seconds["step", "b"]) == 4


@pytest.mark.parametrize("slow_dense", [False, True])
def test_who_takes_long_runs_less(monkeypatch, slow_dense):
    clock = {"a": 0.1, "b": 15.0, DENSE: 6.0}

    def seconds(run, phase, batch):
        run(phase, batch)
        return clock[run.__self__.name]

    monkeypatch.setattr(_measure, "seconds", seconds)
    turns = Turns([Fake(name) for name in clock], None, slow_dense=slow_dense)
    turns.run(repeats=9)
    rounds = {name: len(turns.seconds["step", name]) for name in clock}
    assert rounds == {"a": 9, "b": 5, DENSE: 5 if slow_dense else 0}
    assert (DENSE in turns.skipped) != slow_dense


def test_groups():
    fakes = [Fake("a", 30), Fake("b", 50), Fake("c", 40), Fake("d", 95), Fake("e", 10)]
    together, skipped = groups(fakes, free=100)  # of which 90 are taken
    assert [[c.name for c in group] for group in together] == [["a", "b", "e"], ["c"]]
    assert list(skipped) == ["d"]
    assert groups(fakes, free=None) == ([fakes], {})


def test_environment(monkeypatch):
    monkeypatch.setattr(_environment, "_COPY_BYTES", 1 << 20)
    free = _environment.free_bytes()
    assert free is None or 10**6 < free < 10**14
    copied, seconds = _environment.time_copies(3)
    assert (copied, len(seconds)) == (2 << 20, 3)
    assert 1e8 < copied / min(seconds) < 1e13


# --- what is said ---


def test_numbers():
    assert _report.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    # Medians 2 and 4; the rounds 1/4, 2/2 and 3/6.
    assert _report.ratio([1, 2, 3], [4, 2, 6]) == (0.5, 0.375, 0.75)
    shown = {0.01234: "0.012", 0.9996: "1.00", 1.234: "1.23", 9.996: "10.0"}
    shown |= {12.34: "12.3", 99.96: "100", 1234.5: "1,234"}
    assert {value: _report.digits(value) for value in shown} == shown


def run_of(times):
    """A run of one problem with these times, by phase and name."""
    measurements = [Measurement(*key, 10**9, 6400, s) for key, s in times.items()]
    problem = Problem(1000, 16, 8, "zipf", "float32")
    names = [name for _, name in times]
    result = Result(problem, 7, [names[:1], names[1:]], {"x": "why"}, measurements)
    return Run({}, {"repeats": 3}, 10**6, [0.1], results=[result])


def test_the_verdict_says_where_we_lose():
    run = run_of(
        {
            ("update", "sparse_adam"): [2.0, 2.1, 2.2],
            ("update", TORCH): [1.0, 1.0, 1.0],
            ("step", "sparse_adam"): [1.0, 1.0, 1.0],
            ("step", TORCH): [2.0, 1.0, 0.9],
            ("step", DENSE): [9.0, 9.0],
        }
    )
    where = "1,000 x 16 float32, 8 zipf ids"
    assert _report.verdict(run).splitlines() == [
        "Against torch: faster in 0 of 2 rows.",
        f"  SLOWER: update, sparse_adam, {where}: 2.10 [2.05, 2.15]",
        f"  no clear difference: step, sparse_adam, {where}: 1.00 [0.75, 1.06]",
        "Against optax.adam: faster in 1 of 1 rows.",
    ]
    table = _report.table(run, run.results[0])
    assert "  step, optax.adam, dense: 2 rounds only" in table
    assert "  x: left out, why" in table
    assert "not" not in table
    assert "  too large to take turns all together: sparse_adam; then " in table
