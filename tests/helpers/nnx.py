"""A Flax NNX module with a table, and with each kind of state."""

import jax.numpy as jnp
from flax import nnx

IDS = jnp.array([[0, 3, 15], [3, 7, 0]])


class Model(nnx.Module):
    """A table, and one of each kind of state."""

    def __init__(self, rngs, rows=16, width=4):
        self.embed = nnx.Embed(rows, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.norm(self.dropout(self.embed(ids).mean(axis=1))))


def model(seed=0):
    return Model(nnx.Rngs(seed))


def mean_square(model, ids):
    return jnp.mean(model(ids) ** 2)
