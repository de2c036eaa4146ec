"""A standing benchmark of quality: published figures, met, and dense Adam's numbers.

    python benchmarks/quality.py [--quick] [--seed 0]

Trains cells of `examples/recommender.py` and `examples/knowledge_graph.py` by dense
`optax.adam` and by `osa.exact_adam`, in turns, and fails unless

- both have the same measures to four digits, up to one unit of the last (each is a
  share of about a thousand rankings, of which none may then differ), and
- each published measure is met within 0.01 (MovieLens: 0.02 beside the range of two
  published runs; over seeds the measures of a run have a standard deviation of about
  0.01, see docs/results.md), or is one of `ABOVE`, which are exceeded.

`--quick` trains half of the cells. Needs what the examples need:
`pip install -e ".[examples]"`; downloads two wheels for their data.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import knowledge_graph
import recommender

DENSE, EXACT = "optax.adam, dense", "osa.exact_adam"
MEASURES = ["recall", "mrr", "ndcg", "hit", "precision"]
# Published by a search over settings with another loss; ours is a softmax.
ABOVE = {"kinships, DistMult, negatives"}


def cells(quick):
    """(name, train by an optimiser's name, what is published: lowest and highest, and
    how far off ours may be).
    """
    for cell in knowledge_graph.CELLS:
        if cell.way == "negatives" and cell.model != "TransE":
            graph = knowledge_graph.read_graph(cell.data)
            yield (
                str(cell),
                lambda name, seed, cell=cell, graph=graph: knowledge_graph.train(
                    name, cell, graph, seed
                ),
                {key: (value, value) for key, value in cell.published.items()},
                0.01,
            )
            if quick:
                return
    data = recommender.split(recommender.read_pairs(), 2020)
    published = zip(*recommender.PUBLISHED.values(), strict=True)
    yield (
        "MovieLens 100k, BPR",
        lambda name, seed: recommender.train(name, data, seed),
        {key: (min(x), max(x)) for key, x in zip(MEASURES, published, strict=True)},
        0.02,
    )


def main():
    parser = argparse.ArgumentParser(description="Published figures, met or not.")
    parser.add_argument("--quick", action="store_true", help="one cell, half a minute")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    failed = []
    print(f"{'':32}{'measure':>10}{'published':>18}{'dense':>9}{'exact':>9}")
    for name, train, published, off in cells(args.quick):
        both = {x: train(x, args.seed) for x in (DENSE, EXACT)}
        for measure, (low, high) in published.items():
            dense, exact = (both[x].test[measure] for x in (DENSE, EXACT))
            told = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
            faults = []
            if round(abs(dense - exact), 4) > 1e-4:
                faults.append("exact is not dense")
            if exact < low - off or (exact > high + off and name not in ABOVE):
                faults.append("not as published")
            failed += faults
            end = "  " + ", ".join(faults)
            print(f"{name:32}{measure:>10}{told:>18}{dense:9.4f}{exact:9.4f}{end}")
        for x, done in both.items():
            milliseconds = 1e3 * done.curve[-1][0] / done.steps
            print(f"    {x}: {done.steps:,} steps of {milliseconds:.2f} ms")
    if failed:
        sys.exit(f"{len(failed)} of these are not as they should be")
    print("all as they should be")


if __name__ == "__main__":
    main()
