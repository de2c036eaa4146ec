"""examples/packages.py: as a user meets it."""

import gzip
import itertools
import re
import types

import jax
import numpy as np
import pytest

from ..helpers.examples import load_example

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
