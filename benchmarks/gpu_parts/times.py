"""Times of steps and updates, by XLA, by the kernel, by torch, by dense optax."""

from gpu_parts import DENSE, XLA
from gpu_parts.run import paths
from gpu_parts.steps import OPTIMIZERS, Case, Size, measure_all, measure_torch

MOST = "sparse_adam", "rowwise_adagrad", "exact_adam", "exact_adamw", "lazy(adamw)"
DRAWS = "zipf", "uniform", "half_on_one_row"


def cases(names, phase, *sizes):
    return [Case(x, phase, y, path) for y in sizes for x in names for path in paths()]


def dense(*sizes):
    return [Case(DENSE, "step", size, XLA) for size in sizes]


def names_and_draws(run):
    if run.sizes.is_quick:
        return [x for x in MOST if x != "exact_adamw"], DRAWS[::2]
    return MOST, DRAWS


def update(run):
    """The optimiser alone: from a gradient with duplicates to the new table."""
    (names, draws), size = names_and_draws(run), Size(*run.sizes.large)
    measure_torch(run, "update", size, draws)
    measure_all(run, cases(names, "update", size), draws)


def step(run):
    """Lookup, loss, backward pass and update, by `make_train_step`."""
    (names, draws), size = names_and_draws(run), Size(*run.sizes.large)
    measure_torch(run, "step", size, draws)
    measure_all(run, dense(size))
    measure_all(run, cases(names, "step", size), draws)


def bags(run):
    size = Size(*run.sizes.large, run.sizes.bag)
    names = [x for x in names_and_draws(run)[0] if not x.startswith("exact_adamw")]
    measure_torch(run, "step", size)
    measure_all(run, cases(names, "step", size))


def small(run):
    sizes = [Size(*x) for x in run.sizes.small]
    for size in sizes:
        measure_torch(run, "step", size)
    names = [x for x in names_and_draws(run)[0] if not x.startswith("exact_adamw")]
    measure_all(run, [*dense(*sizes), *cases(names, "step", *sizes)])


def formulas(run):
    """The other optimisers; of one the kernel adds entries up, and no more."""
    others = [x for x in OPTIMIZERS if x not in (*MOST, DENSE)]
    names = others[:3] if run.sizes.is_quick else others
    measure_all(run, cases(names, "step", Size(*run.sizes.formulas)))
    large = Size(*run.sizes.large)
    sizes = large, large._replace(bag=run.sizes.bag)
    measure_all(run, cases(["sparse_adafactor"], "step", *sizes))


def cross(run):
    """From how many rows on a step is faster than the dense one."""
    sizes = [Size(*x) for x in run.sizes.cross]
    names = "sparse_adam", "exact_adam"
    measure_all(run, [*dense(*sizes), *cases(names, "step", *sizes)])


PARTS = {x.__name__: x for x in (update, step, bags, small, cross, formulas)}
