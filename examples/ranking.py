"""How good a ranking is: the measures that papers report, as functions of NumPy.

Two kinds. A *recommender* ranks all items for a user, of whom it knows several right
ones (`top_items`, `of_lists`). A *link predictor* ranks all entities for one right
answer (`ranks`, `of_ranks`), where other right answers are left out ("filtered",
Bordes et al., 2013).
"""

import numpy as np
from matplotlib.figure import Figure


def top_items(scores, known, k=10):
    """The k items of highest score that are not known, best first, `[users, k]`.

    `scores` and `known`, a mask of items that are not to be recommended because the
    user has had them, are `[users, items]`.
    """
    scores = np.where(known, -np.inf, scores)
    best = np.argpartition(-scores, k, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1)


def of_lists(top, right):
    """Recall, MRR, NDCG, hit rate and precision at k, averaged over users.

    `top` is what `top_items` returns, `right` a mask of the right items, `[users,
    items]`. Users without right items do not count. MRR is that of the first right
    item, and 0 where it is not among the k. NDCG divides by that of the best list of k.
    """
    has_some = right.any(axis=1)
    top, right = top[has_some], right[has_some]
    hits, k = np.take_along_axis(right, top, axis=1), top.shape[1]
    number = right.sum(axis=1)
    discount = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.cumsum(discount)[np.minimum(number, k) - 1]
    first = np.where(hits.any(axis=1), 1 / (1 + hits.argmax(axis=1)), 0)
    each = {
        "recall": hits.sum(axis=1) / number,
        "mrr": first,
        "ndcg": hits @ discount / ideal,
        "hit": hits.any(axis=1),
        "precision": hits.mean(axis=1),
    }
    return {name: float(np.mean(x)) for name, x in each.items()}


def ranks(scores, answers, others):
    """The rank of each right answer among all, from 1; ties count half.

    `scores` is `[queries, entities]`, `answers` `[queries]`, and `others` the other
    right answers of each query, which are left out: a list of arrays of indices.
    """
    own = np.take_along_axis(scores, answers[:, None], axis=1)
    better, equal = np.sum(scores > own, axis=1), np.sum(scores == own, axis=1)
    for i, other in enumerate(others):
        better[i] -= np.sum(scores[i, other] > own[i])
        equal[i] -= np.sum(scores[i, other] == own[i])
    return 1 + better + (equal - 1) / 2


def of_ranks(ranks):
    """Mean reciprocal rank, and the shares of ranks up to 1 and up to 10."""
    named = {"mrr": 1 / ranks, "hits@1": ranks <= 1, "hits@10": ranks <= 10}
    return {name: float(np.mean(x)) for name, x in named.items()}


def draw(path, curves, ylabel):
    """A picture of measures on the way: `curves[name]` is a list of (seconds, y)."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    axes = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        seconds, values = zip(*curve, strict=True)
        axes[0].plot(np.arange(1, len(values) + 1), values, label=name)
        axes[1].plot(seconds, values, label=name)
    axes[0].set(xlabel="looks at the validation set", ylabel=ylabel)
    axes[1].set(xlabel="seconds of steps")
    axes[1].legend()
    figure.savefig(path, format="png")


def draw_bars(path, panels, log=()):
    """A picture of numbers side by side: `panels[title][name]`; `log` names titles."""
    figure = Figure(figsize=(5 * len(panels), 3), layout="constrained", dpi=120)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(every, panels.items(), strict=True):
        bars = axes.barh(list(values), list(values.values()), color="#0b6e4f")
        label = "{:,.0f}" if max(values.values()) >= 100 else "{:.3g}"
        axes.bar_label(bars, fmt=label, padding=3)
        axes.set(xlabel=title, xscale="log" if title in log else "linear")
        axes.margins(x=0.2)
    every[0].invert_yaxis()  # the first one on top
    figure.savefig(path, format="png")
