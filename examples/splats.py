"""A picture made of 200,000 Gaussians, trained at the cost of those that are seen.

    python examples/splats.py

Five tables share their rows: position, size, angle, colour and weight of one Gaussian
each. A step renders a few patches of the picture, looks up the Gaussians near them, and
changes no others. `osa.exact_adam` gives them the values of dense Adam, which in each
step would change all. Twice, the Gaussians that add least are pruned, and those where
the picture is worst are split in their places: `osa.reset_rows`. Then the same is done
by dense Adam, for some steps, to compare.

Splatting: Kerbl et al., "3D Gaussian Splatting for Real-Time Radiance Field Rendering",
2023, https://arxiv.org/abs/2308.04079; sums in two dimensions: Zhang et al.,
"GaussianImage", 2024, https://arxiv.org/abs/2403.08551.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from matplotlib.figure import Figure
    from tqdm import tqdm

    import optax_sparse_adam as osa
except ImportError as error:
    install = 'pip install ".[examples]"'
    sys.exit(f"splats.py needs {error.name}, which is not installed; run {install}")

# Not on a terminal: lines of progress now and then.
LINES = {"mininterval": 10, "bar_format": "{l_bar}{bar:10}{r_bar}\n"}
QUIET = {} if sys.stderr.isatty() else LINES

SIDE, PATCH, CELL = 512, 16, 4  # pixels: of the picture, of a patch, of a cell
MARGIN = 1  # cells around a patch whose Gaussians are rendered with it
PATCHES = 16  # of a step, for 200,000 Gaussians; fewer for more
LEARNING_RATE = 0.012  # in the beginning; it falls to zero along a cosine
INDEX_EVERY = 50  # steps after which Gaussians are assigned to cells again
SPLITS, SPLIT_SHARE = 3, 0.02  # how often, and the share that is pruned and split


def make_picture(rng):
    """Discs, stripes and noise of several sizes: `[SIDE, SIDE, 3]`, from 0 to 1."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    picture = np.stack([x, y, 1 - x], axis=-1) * 0.3 + 0.2
    for _ in range(60):
        (cy, cx), radius = rng.random(2), 0.02 + 0.1 * rng.random() ** 2
        inside = (x - cx) ** 2 + (y - cy) ** 2 < radius**2
        stripes = 0.5 + 0.5 * np.sin((x * rng.normal() + y * rng.normal()) * 200)
        picture[inside] = (rng.random(3) * stripes[..., None])[inside]
    return picture.astype(np.float32)


def init_params(count, rng):
    """Gaussians at random places, as large as their share of the picture."""
    scale = SIDE / np.sqrt(count)
    return {
        "position": jnp.asarray(rng.random((count, 2)) * SIDE, jnp.float32),
        "log_size": jnp.full((count, 2), np.log(scale), jnp.float32),
        "angle": jnp.asarray(rng.random((count, 1)) * np.pi, jnp.float32),
        "colour": jnp.full((count, 3), 0.3, jnp.float32),
        "weight": jnp.full((count, 1), 0.3, jnp.float32),
    }


def look_up(params, ids):
    """The rows of all tables; padding, ids out of bounds, reads zeros."""
    return jax.tree.map(lambda t: t.at[ids].get(mode="fill", fill_value=0), params)


def render(rows, corner):
    """The sum of Gaussians at the pixels of a patch, `[PATCH, PATCH, 3]`.

    The exponent is a polynomial of a pixel's place, with coefficients for each
    Gaussian: one product of matrices.
    """
    pixel = jnp.arange(PATCH) - (PATCH - 1) / 2  # from the middle of the patch
    y, x = (z.ravel() for z in jnp.meshgrid(pixel, pixel, indexing="ij"))
    cy, cx = (rows["position"] - corner - PATCH / 2).T
    cos, sin = jnp.cos(rows["angle"][:, 0]), jnp.sin(rows["angle"][:, 0])
    u, v = jnp.exp(-2 * rows["log_size"]).T  # inverse variances along both axes
    yy, xx = u * cos**2 + v * sin**2, u * sin**2 + v * cos**2
    yx = 2 * (u - v) * sin * cos
    square = yy * cy**2 + yx * cy * cx + xx * cx**2
    by_y, by_x = -2 * yy * cy - yx * cx, -2 * xx * cx - yx * cy
    places = jnp.stack([y * y, y * x, x * x, y, x, jnp.ones_like(x)], axis=1)
    coefficients = jnp.stack([yy, yx, xx, by_y, by_x, square])
    density = jnp.exp(-0.5 * places @ coefficients)
    colours = density @ (rows["weight"] * rows["colour"])
    return colours.reshape(PATCH, PATCH, 3)


def loss(params, ids, corners, targets):
    """Mean square of patches, and of each; `ids` are `[patches, capacity]`."""
    errors = jax.vmap(render)(look_up(params, ids), corners) - targets
    of_patches = jnp.mean(errors**2, axis=(1, 2, 3))
    return jnp.mean(of_patches), of_patches


class Cells:
    """Which Gaussians are near a patch, by the cells of the picture."""

    def __init__(self, position, capacity):
        self.capacity, self.padding = capacity, len(position)
        place = np.clip(position // CELL, 0, SIDE // CELL - 1).astype(np.int32)
        cell = place[:, 0] * (SIDE // CELL) + place[:, 1]
        self.order = np.argsort(cell, kind="stable").astype(np.int32)
        self.starts = np.searchsorted(
            cell[self.order], np.arange((SIDE // CELL) ** 2 + 1)
        )

    def near(self, patch, rng):
        """Ids `[capacity]` of Gaussians in or beside a patch, and padding."""
        first = np.array(patch) * PATCH // CELL - MARGIN
        last = first + PATCH // CELL + 2 * MARGIN
        (y0, x0), (y1, x1) = first.clip(0), last.clip(None, SIDE // CELL)
        rows = np.arange(y0, y1) * (SIDE // CELL)
        found = [self.order[self.starts[r + x0] : self.starts[r + x1]] for r in rows]
        ids = np.concatenate(found)
        if len(ids) > self.capacity:
            ids = rng.choice(ids, self.capacity, replace=False)
        missing = self.capacity - len(ids)
        return np.pad(ids, (0, missing), constant_values=self.padding)


class Run:
    """One training: its optimiser, and what it has reached."""

    def __init__(self, tx, params, picture, sparse=None):
        count = len(params["angle"])
        self.tx, self.picture = tx, picture
        self.params = jax.tree.map(jnp.copy, params)  # it is donated
        self.state = tx.init(self.params)
        self.step = osa.make_train_step(loss, tx, has_aux=True, sparse=sparse)
        near = (PATCH + 2 * MARGIN * CELL) ** 2 / SIDE**2 * count
        self.capacity = 64 * int(np.ceil(1.6 * near / 64))
        self.patches = max(2, min(PATCHES, PATCHES * 200_000 // count))
        self.errors = np.zeros((SIDE // PATCH, SIDE // PATCH))
        self.losses, self.seconds, self.split_seconds = [], [], []

    def values(self, ids=None):
        """Rows as they are now: those of exact Adam are brought up to date."""
        table = (lambda p: p) if ids is None else (lambda p: look_up(p, ids))
        return osa.evaluate(table, read=self.state)(self.params)

    def train(self, steps, split_after, name):
        rng = np.random.default_rng(3)
        for number in tqdm(range(steps), name, unit="step", **QUIET):
            if number in split_after:
                self.split(rng)
            if number % INDEX_EVERY == 0 or number in split_after:
                position = self.values()["position"]
                cells = Cells(np.asarray(position), self.capacity)
            patches = rng.integers(SIDE // PATCH, size=(self.patches, 2))
            ids = np.stack([cells.near(patch, rng) for patch in patches])
            corners = patches * PATCH
            targets = np.stack(
                [self.picture[y : y + PATCH, x : x + PATCH] for y, x in corners]
            )
            args = jnp.asarray(ids), jnp.asarray(corners, jnp.float32), targets
            start = time.perf_counter()
            result = self.step(self.params, self.state, *args)
            self.params, self.state, (value, of_patches) = jax.block_until_ready(result)
            self.seconds.append(time.perf_counter() - start)
            self.losses.append(float(value))
            self.errors[patches[:, 0], patches[:, 1]] = of_patches

    def split(self, rng):
        """Prunes the weakest Gaussians; splits those in the worst patches instead."""
        now = jax.tree.map(np.asarray, self.values())
        size = np.exp(now["log_size"]).prod(axis=1)
        count = int(SPLIT_SHARE * len(size))
        places = np.argsort(np.abs(now["weight"][:, 0]) * size)[:count]
        patch = np.clip(now["position"] // PATCH, 0, SIDE // PATCH - 1).astype(int)
        badness = self.errors[patch[:, 0], patch[:, 1]] * size
        badness[places] = 0
        origins = np.argsort(-badness)[:count]
        shift = rng.normal(size=(count, 2)).astype(np.float32)
        start = time.perf_counter()
        result = split_rows(self.tx, self.params, self.state, origins, places, shift)
        self.params, self.state = jax.block_until_ready(result)
        self.split_seconds.append(time.perf_counter() - start)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def split_rows(tx, params, state, origins, places, shift):
    """Two smaller Gaussians in place of each origin, the second one in a pruned row."""
    rows = osa.evaluate(lambda p: look_up(p, origins), read=state)(params)
    away = 0.5 * jnp.exp(rows["log_size"]) * shift
    rows["log_size"] = rows["log_size"] - np.log(1.6)
    both = [rows | {"position": rows["position"] + s * away} for s in (1, -1)]
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *both)
    # One array of ids stands for all five tables.
    return osa.reset_rows(tx, params, state, jnp.concatenate([origins, places]), rows)


def draw_whole(run):
    """The picture as it is now, patch by patch."""
    values, rng = run.values(), np.random.default_rng(0)
    cells, side = Cells(np.asarray(values["position"]), run.capacity), SIDE // PATCH
    rows = jax.jit(lambda p, ids, corner: render(look_up(p, ids), corner))
    strips = []
    for y in range(side):
        patches = [
            rows(values, cells.near((y, x), rng), jnp.array([y, x]) * float(PATCH))
            for x in range(side)
        ]
        strips.append(np.concatenate(patches, axis=1))
    return np.concatenate(strips).clip(0, 1)


def plot(path, picture, before, after, runs):
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    titles = "the picture", "before", f"after {len(runs[0][1].losses)} steps"
    for axis, title, image in zip(axes, titles, (picture, before, after), strict=False):
        axis.imshow(image)
        axis.set(title=title, xticks=[], yticks=[])
    for name, run in runs:
        smooth = np.convolve(run.losses, np.ones(10) / 10, "valid")
        axes[3].plot(np.cumsum(run.seconds)[9:], smooth, label=name)
    axes[3].set(xlabel="seconds of steps", ylabel="mean square", yscale="log")
    axes[3].legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gaussians", type=int, default=200_000, help="default: 200000")
    add("--steps", type=int, default=600, help="default: 600")
    add(
        "--dense-steps",
        type=int,
        default=60,
        help="first steps, by optax.adam (default: 60)",
    )
    add("--plot", type=Path, default=Path("splats.png"), help="default: splats.png")
    args = parser.parse_args()
    for name, least in (("gaussians", 1000), ("steps", 10), ("dense_steps", 10)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least {least}")

    rng = np.random.default_rng(0)
    picture, params = make_picture(rng), init_params(args.gaussians, rng)
    rate = optax.cosine_decay_schedule(LEARNING_RATE, args.steps)
    run = Run(osa.exact_adam(rate), params, picture)
    print(
        f"{args.gaussians:,} Gaussians in five tables; a step renders {run.patches} "
        f"patches of {PATCH} x {PATCH} pixels, each with {run.capacity:,} Gaussians"
    )
    before = draw_whole(run)
    split_after = [args.steps * (i + 1) // (SPLITS + 1) for i in range(SPLITS)]
    run.train(args.steps, split_after, "osa.exact_adam")
    after = draw_whole(run)
    # The dense gradient is what optax.adam takes.
    dense = Run(optax.adam(rate), params, picture, sparse=False)
    dense.train(min(args.dense_steps, args.steps), split_after, "optax.adam")
    runs = [("osa.exact_adam", run), ("optax.adam, dense", dense)]
    steps = min(len(one.losses) for _, one in runs)
    print(f"{'':20}{'a step':>12}{'prune and split':>18}{f'loss of {steps} steps':>20}")
    for name, one in runs:
        fastest = min(one.split_seconds, default=None)  # the first one is compiled
        split = "-" if fastest is None else f"{1e3 * fastest:.1f} ms"
        print(
            f"{name:20}{1e3 * np.median(one.seconds):9.1f} ms{split:>18}"
            f"{np.mean(one.losses[:steps]):20.6f}"
        )
    error = np.mean((after - picture) ** 2)
    print(f"the whole picture: {-10 * np.log10(error):.1f} dB; see {args.plot}")
    plot(args.plot, picture, before, after, runs)


if __name__ == "__main__":
    main()
