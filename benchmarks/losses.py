"""Draws losses by steps and by seconds: dense `optax.adam` and `osa.exact_adam`.

`python benchmarks/losses.py [--steps 1500] [--plot losses.png]` trains the model of
`examples/word2vec.py` with both, from the same first values and on the same batches.
Seconds are those of the steps, without compilation and evaluation. Needs what the
example needs: `pip install -e ".[examples]"`.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import OtherPrograms, describe, seconds
from matplotlib.figure import Figure

import optax_sparse_adam as osa

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import word2vec

EVERY = 50  # steps between two evaluations
LOOKS = {
    "optax.adam": {"color": "#8d99ae", "marker": "^", "markersize": 6},
    "osa.exact_adam": {"color": "#0b6e4f", "marker": "o", "markersize": 3.5},
}


def train(value_and_grad, optimizer, params, batches, num_steps, held_out):
    """Steps, seconds and held-out losses, and the milliseconds of each step."""
    step = word2vec.make_step(value_and_grad, optimizer)
    params = jax.tree.map(jnp.copy, params)
    now = [params, optimizer.init(params)]
    taken, points = [], [(0, 0.0, word2vec.mean_loss(params, held_out))]

    def run(batch):
        *now[:], _ = compiled(*now, batch)
        jax.block_until_ready(now)

    for count, batch in enumerate(itertools.islice(batches, num_steps), 1):
        if count == 1:
            compiled = step.lower(*now, batch).compile()
        taken.append(seconds(run, batch))
        if count % EVERY == 0:
            values, _ = osa.flush(*now)
            loss = word2vec.mean_loss(values, held_out)
            points.append((count, sum(taken), loss))
    return points, [1e3 * x for x in taken]


def draw(path, runs, machine):
    canvas = Figure(figsize=(9.5, 3.9), layout="constrained", dpi=150)
    panels = canvas.subplots(1, 2, sharey=True)
    for name, (points, taken) in runs.items():
        steps, clock, losses = zip(*points, strict=True)
        style = LOOKS[name] | {"linewidth": 1.6}
        label = f"{name}, {statistics.median(taken):.1f} ms a step"
        panels[0].plot(steps, losses, label=label, **style)
        panels[1].plot(clock, losses, **style)
    for axes, label in zip(panels, ("steps", "seconds"), strict=True):
        axes.set(xlabel=label)
        axes.set_title(f"by {label}", fontsize=10, loc="left")
        axes.grid(color="#e3e3e3", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss on held-out text")
    canvas.legend(loc="outside lower center", ncols=2, frameon=False)
    canvas.suptitle(machine, fontsize=9, color="#555555")
    canvas.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_500)
    parser.add_argument("--plot", type=Path, default=Path("losses.png"))
    args = parser.parse_args()
    words, counts, tokens = word2vec.read_corpus()
    pieces, source = word2vec.split(tokens), word2vec.SkipGrams(counts)
    held_out = source.held_out(pieces[::20], np.random.default_rng(0))
    known = [piece for i, piece in enumerate(pieces) if i % 20]
    params = word2vec.init_params(len(words), np.random.default_rng(1))
    rate = word2vec.LEARNING_RATE
    schedule = optax.linear_schedule(rate, 0.05 * rate, args.steps)
    others, runs = OtherPrograms(), {}
    for name, optimizer in {
        "optax.adam": (jax.value_and_grad, optax.adam(schedule)),
        "osa.exact_adam": (osa.value_and_grad, osa.exact_adam(schedule)),
    }.items():
        batches = source.train(known, np.random.default_rng(2))
        runs[name] = train(*optimizer, params, batches, args.steps, held_out)
        points, taken = runs[name]
        print(
            f"{name}: {statistics.median(taken):.1f} ms a step, {points[-1][1]:.1f} s, "
            f"last loss {points[-1][2]:.4f}"
        )
    dense, exact = (points for points, _ in runs.values())
    apart = max(abs(a[2] - b[2]) for a, b in zip(dense, exact, strict=True))
    print(f"largest difference of the losses: {apart:.5f}")
    there = describe()
    size = f"word vectors, 2 tables of {len(words):,} x {word2vec.DIM}"
    draw(args.plot, runs, f"{size}; {there['device']}, {there['cores']} cores")
    print(others.in_words())


if __name__ == "__main__":
    main()
