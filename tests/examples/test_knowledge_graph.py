"""examples/knowledge_graph.py: as a user meets it; and examples/ranking.py."""

import re

import jax
import numpy as np
import pytest

from ..helpers.examples import load_example

pytestmark = pytest.mark.slow

graphs = load_example("knowledge_graph")
ranking = graphs.ranking


@pytest.fixture
def folder(tmp_path):
    """A graph of two relations that are functions of the head."""
    rng = np.random.default_rng(0)
    n = 40
    triples = [(i, "next", (i + 1) % n) for i in range(n)]
    triples += [(i, "opposite", (i + n // 2) % n) for i in range(n)]
    triples = rng.permutation(np.array(triples, dtype=str))
    for part, rows in zip(
        ("valid", "test", "train"), np.split(triples, [6, 12]), strict=True
    ):
        text = "".join("\t".join(row) + "\n" for row in rows)
        (tmp_path / f"{part}.txt").write_text(text)
    return tmp_path


def test_top_items_and_measures():
    """Against loops over users and places of the list."""
    rng = np.random.default_rng(0)
    scores, known = rng.normal(size=(30, 50)), rng.random((30, 50)) < 0.3
    right = (rng.random((30, 50)) < 0.1) & ~known
    right[3] = False  # a user without right items does not count
    top = ranking.top_items(scores, known, k=7)
    sums = dict.fromkeys(["recall", "mrr", "ndcg", "hit", "precision"], 0.0)
    for user in set(range(30)) - {3}:
        order = sorted(set(range(50)) - {*np.nonzero(known[user])[0]})
        best = sorted(order, key=lambda item: -scores[user, item])[:7]
        assert best == top[user].tolist()
        places = [k for k, item in enumerate(best) if right[user, item]]
        number = right[user].sum()
        ideal = sum(1 / np.log2(k + 2) for k in range(min(7, number)))
        sums["recall"] += len(places) / number
        sums["mrr"] += 1 / (places[0] + 1) if places else 0
        sums["ndcg"] += sum(1 / np.log2(k + 2) for k in places) / ideal
        sums["hit"] += bool(places)
        sums["precision"] += len(places) / 7
    for name, value in ranking.of_lists(top, right).items():
        assert value == pytest.approx(sums[name] / 29, rel=1e-12)


def test_ranks():
    """Other right answers are left out, and ties count half."""
    scores = np.array([[3.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 0.0]])
    others = [np.array([0]), np.array([], int)]
    found = ranking.ranks(scores, np.array([2, 0]), others)
    np.testing.assert_array_equal(found, [1.5, 2.0])
    measures = ranking.of_ranks(found)
    assert measures == {"mrr": (1 / 1.5 + 0.5) / 2, "hits@1": 0.0, "hits@10": 1.0}


@pytest.mark.parametrize("cell", graphs.CELLS[:4], ids=str)
def test_a_cell_learns(folder, cell):
    """Each model and way on a graph of functions; dense and exact agree."""
    graph = graphs.read_graph(folder)
    cell = cell._replace(epochs=40, batch=64, columns=32, rate=0.05, inverses=True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        dense, exact = (
            graphs.train(name, cell, graph, seed=0)
            for name in ("optax.adam, dense", "osa.exact_adam")
        )
    # Of later epochs rounding makes others: the 1-norm's gradient is a sign.
    np.testing.assert_allclose(exact.losses[:4], dense.losses[:4], rtol=1e-3)
    assert exact.losses[-1] < 0.5 * exact.losses[0]


def test_a_whole_run(folder, monkeypatch, capsys):
    options = ["--data", str(folder), "--epochs", "3", "--seeds", "2"]
    monkeypatch.setattr("sys.argv", ["knowledge_graph.py", *options])
    monkeypatch.setattr(graphs, "LARGE", graphs.LARGE._replace(batch=32))
    monkeypatch.chdir(folder)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        graphs.main()
    printed = capsys.readouterr().out
    assert "40 entities, 136 triples to train with, both ways" in printed
    for name in graphs.OPTIMIZERS:
        assert re.search(rf"^{name}( +0\.\d{{4}}){{3}} +\d+\.\d\d +12$", printed, re.M)
    assert printed.count("over seeds") == 3
    assert (folder / "knowledge_graph.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_wrong_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["knowledge_graph.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit):
        graphs.main()
    assert "--data must be a folder with train.txt" in capsys.readouterr().err
