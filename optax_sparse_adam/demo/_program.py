"""The program: prepares, trains with both optimisers, reports."""

import argparse
import itertools
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import optax_sparse_adam as osa

from .._command_line import InputError, columns, exit_code, need
from ._corpus import Batch, Corpus, SkipGrams, read_corpus
from ._options import parse_args
from ._word2vec import (
    Params,
    Trainer,
    deferred_interrupt,
    init_params,
    mean_loss,
    nearest,
    train,
)

_HELD_OUT_PAIRS = 1 << 14
_AMONG = 5_000  # only so many words, the most frequent ones, are shown as neighbours
_NEIGHBOURS = 5
_SHOWN = "read,max,left,first,True,stdin,encode,hour,width,red,lock,socket"
_NUM_SHOWN = 12


def _choose_words(corpus: Corpus, asked: str | None) -> list[int]:
    """Ids of the words to show: those asked for, or familiar, or long frequent ones."""
    index = {word: i for i, word in enumerate(corpus.words)}
    if asked is not None:
        words = [word.strip() for word in asked.split(",")]
        if unknown := [word for word in words if word not in index]:
            raise InputError(
                "--words must be words of the text, separated by commas, got "
                f"{unknown[0]!r}, which is not among its {len(index):,} words; check "
                "the case, or lower --min-count"
            )
        return [index[word] for word in words]
    familiar = [word for word in _SHOWN.split(",") if word in index]
    longer = [word for word in corpus.words if len(word) > 4]
    words = list(dict.fromkeys(familiar + longer + corpus.words))
    return [index[word] for word in words[:_NUM_SHOWN]]


class _Task(NamedTuple):
    """All that training needs, the same for both optimisers."""

    corpus: Corpus
    shown: list[int]
    held_out: list[Batch]
    batches: Iterator[Batch]
    params: Params


def _prepare(args: argparse.Namespace) -> _Task:
    corpus = read_corpus(args.text, args.min_count, args.max_words)
    shown = _choose_words(corpus, args.words)
    source = SkipGrams(
        corpus,
        window=args.window,
        negatives=args.negatives,
        sample=args.sample,
        batch=args.batch,
    )
    seeds = np.random.default_rng(args.seed).spawn(3)
    held_out = source.held_out(seeds[0], _HELD_OUT_PAIRS)
    params = init_params(len(corpus.words), args.dim, seeds[1])
    return _Task(corpus, shown, held_out, source.train(seeds[2]), params)


def _print_task(args: argparse.Namespace, corpus: Corpus) -> None:
    library = f"standard library of Python {platform.python_version()}"
    num_words = len(corpus.words)
    touched = min(args.batch, num_words)
    touched += min(args.batch * (1 + args.negatives), num_words)
    print(
        f"text    {args.text or library}\n"
        f"        files: {corpus.num_files:,}, tokens: {len(corpus.tokens):,}, "
        f"words seen {args.min_count:,} times or more: {num_words:,}\n"
        f"tables  2 of {num_words:,} rows x {args.dim} float32, "
        f"{num_words * args.dim * 4 / 1e6:.1f} MB each\n"
        f"step    {args.batch:,} pairs with {args.negatives} negatives each: "
        f"at most {touched:,} of {2 * num_words:,} rows touched",
        flush=True,
    )


def _learn(
    args: argparse.Namespace,
    task: _Task,
    trainers: dict[str, Trainer],
    tqdm: Any,
    pressed: Callable[[], bool],
) -> list[tuple[str, ...]]:
    """Trains, at first both in turns; returns a table of what was measured."""

    def steps(num_steps: int, title: str, *trainers: Trainer) -> None:
        pairs = num_steps * args.batch
        form = {"unit": "pair", "unit_scale": True, "mininterval": 0.5}
        with tqdm(total=pairs, desc=title, **form) as bar:
            batches = itertools.islice(task.batches, num_steps)
            train(trainers, batches, bar, pressed)

    def loss(trainer: Trainer) -> str:
        return f"{mean_loss(trainer.params, task.held_out):.3f}"

    sparse, dense = trainers.values()
    together = min(args.compare, args.steps)
    before = ("held-out loss before", loss(sparse), loss(dense))
    steps(together, "both in turns", sparse, dense)
    seconds = [np.array(trainer.seconds) for trainer in (sparse, dense)]
    rows: list[tuple[str, ...]] = [
        ("", *trainers),
        ("gradient", "row-sparse", "dense"),
        ("time of a step, median", *(f"{np.median(s) * 1e3:.2f} ms" for s in seconds)),
        (f"time of {together:,} steps", *(f"{s.sum():.2f} s" for s in seconds)),
        before,
        (f"held-out loss after {together:,} steps", loss(sparse), loss(dense)),
    ]
    if args.steps > together:
        steps(args.steps - together, "sparse_adam", sparse)
        rows.append((f"held-out loss after {args.steps:,} steps", loss(sparse), "-"))
    return rows


def _save(path: Path, corpus: Corpus, params: Params) -> None:
    words = np.array(corpus.words)
    with deferred_interrupt(), path.open("wb") as file:
        np.savez(file, words=words, counts=corpus.counts, **jax.device_get(params))


def _plot(figure: Any, path: Path, trainers: dict[str, Trainer]) -> None:
    canvas = figure.Figure(figsize=(9, 3.6), layout="constrained")
    by_step, by_time = canvas.subplots(1, 2, sharey=True)
    for name, trainer in trainers.items():
        losses = trainer.recent_losses()
        first = len(trainer.losses) - len(losses)
        by_step.plot(first + 1 + np.arange(len(losses)), losses, label=name)
        by_time.plot(np.cumsum(trainer.seconds)[first:], losses, label=name)
    by_step.set(xscale="log", xlabel="steps", ylabel="loss of a pair, running mean")
    by_time.set(xscale="log", xlabel="seconds of training steps")
    by_step.legend()
    canvas.savefig(path)


def _print_neighbours(corpus: Corpus, center: Any, shown: Sequence[int]) -> None:
    among = min(_AMONG, len(corpus.words))
    found = nearest(center, shown, _NEIGHBOURS, among)
    table = []
    for word, rows, cosines in zip(shown, *found, strict=True):
        near = (
            f"{corpus.words[i]} {c:.2f}" for i, c in zip(rows, cosines, strict=True)
        )
        table.append((corpus.words[word], *near))
    print(f"\nNearest of the {among:,} most frequent words, by cosine:")
    print(columns(table, str.ljust))


def _print_results(rows: Sequence[tuple[str, ...]]) -> None:
    print(
        "\nBoth in turns: the same model, first values and batches, each step waited\n"
        "for. The loss is that of a pair, in text that was held out. optax.adam moves\n"
        "all rows in every step, osa.sparse_adam those of the batch."
    )
    print(columns(rows, str.rjust))


def _run(args: argparse.Namespace) -> int:
    tqdm = need("demo", "tqdm").tqdm
    figure = need("demo", "matplotlib.figure") if args.plot else None
    began = time.perf_counter()
    task = _prepare(args)
    _print_task(args, task.corpus)

    rate = optax.linear_schedule(
        args.learning_rate, 0.05 * args.learning_rate, args.steps
    )
    start = (task.params, task.held_out[0])
    sparse = Trainer(osa.value_and_grad, osa.sparse_adam(rate), *start)
    dense = Trainer(jax.value_and_grad, optax.adam(rate), *start)
    trainers = {"osa.sparse_adam": sparse, "optax.adam": dense}
    try:
        with deferred_interrupt() as pressed:
            rows = _learn(args, task, trainers, tqdm, pressed)
    except KeyboardInterrupt:
        kept = f"the vectors are in {args.save}" if args.save else "nothing is saved"
        if args.save:
            _save(args.save, task.corpus, sparse.params)
        num_steps = len(sparse.losses)
        print(f"demo: interrupted after {num_steps:,} steps; {kept}", file=sys.stderr)
        return 130

    if args.save:
        _save(args.save, task.corpus, sparse.params)
    if args.plot:
        _plot(figure, args.plot, trainers)
    _print_neighbours(task.corpus, jax.device_get(sparse.params["center"]), task.shown)
    _print_results(rows)
    seconds = time.perf_counter() - began
    pairs = args.steps * args.batch / 1e6
    print(f"\n{args.steps:,} steps, {pairs:.2f} million pairs, {seconds:.0f} s in all")
    for path, what in ((args.save, "vectors"), (args.plot, "losses")):
        if path:
            print(f"{what} in {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit code: 0, 2 for bad input, 130 for Ctrl-C."""
    return exit_code("demo", lambda: _run(parse_args(argv)))
