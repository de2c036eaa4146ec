"""examples/packages.py: as a user meets it, and its parts against plain loops."""

import gzip
import itertools
import math
import re
import types

import jax
import numpy as np
import pytest

from ..helpers.examples import interrupt_example, load_example
from ..helpers.support import assert_close

pytestmark = pytest.mark.slow

packages = load_example("packages")
GROUPS, PER_GROUP = 8, 12


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Groups of packages, each of which depends on most others of its group."""
    rng = np.random.default_rng(0)
    stanzas = []
    for group in range(GROUPS):
        names = [f"pkg{chr(97 + group)}{i}" for i in range(PER_GROUP)]
        for name in names:
            others = [x for x in names if x != name and rng.random() < 0.7]
            stanza = f"Package: {name}\nDepends: libc6 (>= 2.3), {', '.join(others)}\n"
            stanzas.append(f"{stanza}Description: not a field, that counts\n")
    path = tmp_path_factory.mktemp("index") / "Packages.gz"
    path.write_bytes(gzip.compress("\n".join(stanzas).encode()))
    return path


def test_a_whole_run(index, tmp_path, monkeypatch, capsys):
    """With a clock on which a step takes 10 ms, and each one after the 100th 2."""
    read = itertools.chain(np.arange(0, 2, 0.01), itertools.count(2, 0.002))
    clock = types.SimpleNamespace(perf_counter=lambda: next(read))
    monkeypatch.setattr(packages, "time", clock)
    options = ["packages.py", "--index", str(index), "--seconds", "0.995"]
    monkeypatch.setattr("sys.argv", options)
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        packages.main()
    stdout = capsys.readouterr().out
    number = GROUPS * PER_GROUP
    assert f"{number + 1} packages, " in stdout
    assert f" edges, libc6 in {number}\n" in stdout
    assert (tmp_path / "packages.png").read_bytes().startswith(b"\x89PNG\r\n")
    results = re.findall(
        r"^osa\.(\w+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$",
        stdout,
        re.MULTILINE,
    )
    names = ["exact_adam", "sparse_adam", "rowwise_adagrad"]
    # After as many steps as dense Adam has taken, and after as much time.
    assert [result[:4] for result in results] == [
        (name, steps, seconds, "2.00")
        for steps, seconds in (("100", "0.2"), ("498", "1.0"))
        for name in names
    ]
    guess = float(re.search(r"the most frequent +([\d.]+)", stdout)[1])
    for *_, mrr, hits in results[3:]:
        # An edge goes to one of the eleven others, of which eight are known.
        assert float(mrr) > 2 * guess
        assert float(hits) > 0.9
    # "pkga3   pkga7, pkga1, ...": of its own group, but for libc6
    near = re.findall(r"^  (pkg\w)(\d+) +(\w.*)$", stdout, re.MULTILINE)
    assert len(near) >= 11
    for group, _, others in near:
        same = [other.startswith(group) for other in others.split(", ")]
        assert sum(same) >= 4, (group, others)


def test_ctrl_c(index, tmp_path):
    options = ["--index", index, "--seconds", 100_000]
    for after in (r"\| +numpy$", "^a step", r"\| 1/100000 s"):
        interrupt_example("packages", *options, cwd=tmp_path, after=after)


TEXT = """\
Package: a
Depends: libc6 (>= 2.34), b | c:any [amd64 arm64],
 d
Suggests: e
Breaks: f (<< 1.0)

Package: g
Pre-Depends: a
Description: Depends: nothing
"""


def test_edges_of_an_index():
    assert list(packages.read_edges(TEXT)) == [
        *[("a", "Depends", name) for name in ("libc6", "b", "c", "d")],
        ("a", "Suggests", "e"),
        ("g", "Pre-Depends", "a"),
    ]
    names, edges = packages.make_graph(packages.read_edges(TEXT))
    assert names[0] == "a"  # in all six
    assert sorted(names) == ["a", "b", "c", "d", "e", "g", "libc6"]
    written = {(names[h], packages.RELATIONS[r], names[t]) for h, r, t in edges}
    assert written == set(packages.read_edges(TEXT))


def test_what_can_go_wrong(tmp_path, main_of, monkeypatch):
    monkeypatch.setattr(packages, "APT", tmp_path)
    assert "--index FILE" in main_of(packages)
    assert "must be a file that exists" in main_of(packages, "--index", tmp_path / "no")
    (tmp_path / "other").write_text("nothing")
    assert "100 edges, got 0" in main_of(packages, "--index", tmp_path / "other")


def test_ranks_equal_a_plain_loop():
    rng = np.random.default_rng(0)
    num, relations = 12, 3
    known = np.unique(
        np.stack([rng.integers(num, size=60), rng.integers(relations, size=60),
                  rng.integers(num, size=60)], axis=1), axis=0
    )  # fmt: skip
    scores = rng.integers(6, size=(num, relations, num))  # with ties
    ranking = packages.Ranking(known[:20], known)
    expected = []
    for head, relation, tail in known[:20]:
        others = [
            scores[head, relation, x]
            for x in range(num)
            if x == tail or [head, relation, x] not in known.tolist()
        ]
        own = scores[head, relation, tail]
        better = sum(x > own for x in others)
        expected.append(1 + better + (sum(x == own for x in others) - 1) / 2)
    found = ranking.ranks(lambda head, relation: scores[head, relation])
    assert found.tolist() == expected


def test_loss_is_that_of_complex():
    rng = np.random.default_rng(0)
    params = packages.init_params(9, rng)
    edges, negatives = np.array([[0, 2, 5], [3, 9, 3]], np.int32), np.array([1, 7, 7])
    e, r = (
        np.asarray(params[x], np.float64) @ np.kron([[1], [1j]], np.eye(packages.DIM))
        for x in ("package", "relation")
    )

    def score(head, relation, tail):
        return float(np.real(np.sum(e[head] * r[relation] * np.conj(e[tail]))))

    expected = 0.0
    for head, relation, tail in edges.tolist():
        scores = [score(head, relation, x) for x in (tail, *negatives)]
        expected += math.log(sum(map(math.exp, scores))) - scores[0]
    assert_close(packages.loss_fn(params, edges, negatives), expected, 1e-6)
