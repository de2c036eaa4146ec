"""rowwise_adagrad over bags is FBGEMM's EXACT_ROWWISE_ADAGRAD, where that is installed.

`pip install --no-deps fbgemm-gpu-cpu==1.8.0`, beside torch 2.13.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.support import assert_close

SIZES, BAGS, LENGTH, STEPS, DIM = (50, 400, 7), 16, 5, 8, 12


@pytest.mark.torch
def test_steps_of_fbgemm(backend):
    torch = pytest.importorskip("torch")
    training = pytest.importorskip(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training"
    )
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    place = training.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    theirs = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(size, DIM, *place) for size in SIZES],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.05,
        eps=1e-8,
        output_dtype=configs.SparseType.FP32,
    )
    rng = np.random.default_rng(0)
    start = [rng.standard_normal((size, DIM)).astype("float32") for size in SIZES]
    for weights, values in zip(theirs.split_embedding_weights(), start, strict=True):
        weights.data.copy_(torch.from_numpy(values))
    tables, tx = [*map(jnp.asarray, start)], osa.rowwise_adagrad(0.05, eps=1e-8)

    def loss(tables, ids, target):
        bags = [osa.embedding_bag(x, i) for x, i in zip(tables, ids, strict=True)]
        return jnp.sum((jnp.concatenate(bags, axis=1) - target) ** 2)

    step = osa.make_train_step(loss, tx)
    state = tx.init(tables)
    offsets = torch.arange(0, len(SIZES) * BAGS * LENGTH + 1, LENGTH)
    for _ in range(STEPS):
        ids = [rng.integers(0, size, (BAGS, LENGTH)) for size in SIZES]
        target = rng.standard_normal((BAGS, len(SIZES) * DIM)).astype("float32")
        flat = torch.from_numpy(np.concatenate([x.ravel() for x in ids]))
        sums = theirs(flat, offsets)
        torch.sum((sums - torch.from_numpy(target)) ** 2).backward()
        ids = [jnp.asarray(x, jnp.int32) for x in ids]
        tables, state, _ = step(tables, state, ids, jnp.asarray(target))
    for ours, weights in zip(tables, theirs.split_embedding_weights(), strict=True):
        assert_close(jax.device_get(ours), weights.detach(), 1e-5, magnitude=1.0)
