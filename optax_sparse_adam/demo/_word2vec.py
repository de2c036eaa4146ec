"""The model of the demo: skip-gram with negative sampling, and how it is trained."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import optax_sparse_adam as osa

from ._corpus import Batch

Params = dict[str, jax.Array]
Floats = NDArray[np.float32]

RECENT = 100  # steps in the running mean of the loss


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Negative sampling, equation 4 of arXiv:1310.4546, summed over the batch.

    A sum, because word2vec takes a step for each pair. A mean would divide the gradient
    of a row by the batch and bring it near to the `eps` of Adam. Computed in float32,
    whatever the type of the tables.
    """
    center = params["center"][batch.centers].astype(jnp.float32)
    context = params["context"][batch.contexts].astype(jnp.float32)
    scores = jnp.einsum("bd,bkd->bk", center, context)
    true, noise = scores[:, 0], scores[:, 1:]
    return -jnp.sum(jax.nn.log_sigmoid(true)) - jnp.sum(jax.nn.log_sigmoid(-noise))


def init_params(num_words: int, dim: int, rng: np.random.Generator) -> Params:
    """Two tables `[num_words, dim]`, with the initial values of word2vec."""
    center = rng.uniform(-0.5 / dim, 0.5 / dim, (num_words, dim))
    return {
        "center": jnp.asarray(center, jnp.float32),
        "context": jnp.zeros((num_words, dim), jnp.float32),
    }


class Trainer:
    """A model in training.

    Args:
      value_and_grad: `jax.value_and_grad` or `osa.value_and_grad`; that and the
        optimiser are all that differs between dense and row-sparse training.
      optimizer: The optimiser for such gradients.
      params: The initial values; they are copied.
      batch: A batch to compile for.

    Attributes:
      params: The tables.
      losses: The loss of a pair, for each step.
      seconds: How long each step took, from the batch in numpy to the new tables.
    """

    def __init__(
        self,
        value_and_grad: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        params: Params,
        batch: Batch,
    ) -> None:
        def step(params: Params, state: Any, batch: Batch) -> Any:
            loss, grads = value_and_grad(loss_fn)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return osa.apply_updates(params, updates), state, loss

        self.params: Params = jax.tree.map(jnp.copy, params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._state = optimizer.init(self.params)
        # Donated tables and moments are updated in place.
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self._step = jitted.lower(self.params, self._state, batch).compile()

    def advance(self, batch: Batch) -> None:
        """Takes a step and waits until it is done."""
        start = time.perf_counter()
        self.params, self._state, loss = self._step(self.params, self._state, batch)
        jax.block_until_ready((self.params, self._state, loss))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss) / len(batch.centers))

    def recent_losses(self) -> NDArray[np.float64]:
        """Running means of the loss, over all steps while there are few."""
        width = min(RECENT, len(self.losses))
        return np.convolve(self.losses, np.full(width, 1 / width), mode="valid")


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Holds Ctrl-C back; yields a function that says whether it was pressed.

    Amid a step the old tables are donated and the new ones not yet assigned: there
    would be nothing left to save.
    """
    pressed = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def train(
    trainers: Sequence[Trainer],
    batches: Iterable[Batch],
    bar: Any,
    pressed: Callable[[], bool],
) -> None:
    """Lets trainers take each batch in turns; `bar` shows the loss of the first.

    Raises:
      KeyboardInterrupt: After a step, if `pressed` says so.
    """
    for step, batch in enumerate(batches, 1):
        for trainer in trainers:
            trainer.advance(batch)
        if step % RECENT == 0:
            loss = np.mean(trainers[0].losses[-RECENT:])
            bar.set_postfix_str(f"loss={loss:.3f}", refresh=False)
        bar.update(len(batch.centers))
        if pressed():
            raise KeyboardInterrupt


_loss = jax.jit(loss_fn)


def mean_loss(params: Params, batches: Sequence[Batch]) -> float:
    """The loss of a pair, averaged over batches of one size."""
    losses = [_loss(params, batch) / len(batch.centers) for batch in batches]
    return float(np.mean(losses))


def nearest(
    vectors: Floats, ids: Sequence[int], num: int, among: int
) -> tuple[NDArray[np.intp], Floats]:
    """The rows nearest to some rows by cosine, best first, the row itself left out.

    Args:
      vectors: `[num_rows, dim]`.
      ids: The rows whose neighbours are wanted.
      num: How many neighbours.
      among: Only the first `among` rows can be neighbours.

    Returns:
      Row ids and cosines, `[len(ids), num]` each.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Any = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    cosines = unit[list(ids)] @ unit[:among].T
    cosines[np.arange(min(among, len(unit))) == np.asarray(ids)[:, None]] = -np.inf
    rows = np.argsort(-cosines, axis=1)[:, :num]
    return rows, np.take_along_axis(cosines, rows, axis=1)
