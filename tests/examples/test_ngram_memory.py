"""examples/ngram_memory.py: as a user meets it."""

import re

import jax
import numpy as np
import optax
import pytest

from ..helpers.examples import load_example

pytestmark = pytest.mark.slow

ngram_memory = load_example("ngram_memory")
ngram_memory.LAYERS = 1  # half of it to compile
ROWS = 3000


@pytest.fixture(autouse=True)
def default_promotion():
    """Flax and optax promote types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    options = ["ngram_memory.py", "--steps", "12", "--rows", "200000"]
    monkeypatch.setattr("sys.argv", options)
    monkeypatch.chdir(tmp_path)
    ngram_memory.main()
    stdout = capsys.readouterr().out
    number = r" +([\d.,]+)"
    lines = re.findall(
        rf"^(\w.*?){number * 4} after (\d+) steps$", stdout, re.MULTILINE
    )
    names, *columns, steps = zip(*lines, strict=True)
    assert names == ("without memory", "with memory", "dense AdamW")
    assert steps == ("12", "12", "10")
    milliseconds, held, besides, bits = (
        [float(x.replace(",", "")) for x in column] for column in columns
    )
    assert min(milliseconds) > 0
    table = 200_000 * ngram_memory.MEMORY_WIDTH * 4 / 1e6
    # The table and one number a row, or the table and two moments.
    one_number = table / ngram_memory.MEMORY_WIDTH
    # Rounded to whole MB; the projection of what is found, and its moments, are 0.3.
    assert abs(held[1] - held[0] - table - one_number) < 1.5
    assert abs(held[2] - held[1] - 2 * table + one_number) < 1.5
    assert besides[2] > besides[1] + 0.9 * table  # the dense gradient
    assert bits[1] < bits[0] - 0.1 < 5
    assert (tmp_path / "ngram_memory.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_exact_adamw_has_the_losses_of_dense_adamw():
    batch = np.random.default_rng(0).integers(256, size=(16, 65)).astype(np.int32)
    text, runs = np.tile(batch[0], 3), []
    rate = optax.cosine_decay_schedule(1e-2, 20)
    for row_sparse in (False, True):

        def make(params, row_sparse=row_sparse):
            if not row_sparse:
                return optax.adamw(rate)
            return ngram_memory.optimizer_of_parts(params, rate, "exact_adamw")

        run = ngram_memory.Trainer(
            ngram_memory.LanguageModel(ROWS), make, batch, row_sparse
        )
        runs.append(run.train("test", text, [batch], num_steps=20))
    dense, exact = runs
    assert dense.losses[-1] < dense.losses[0] - 1
    np.testing.assert_allclose(exact.losses, dense.losses, rtol=2e-3)
    np.testing.assert_allclose(exact.history, dense.history, rtol=2e-3)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "exact_adamw"])
def test_on_the_host_it_has_the_same_losses(optimizer, tmp_path):
    """To the bits, but for what other flags of XLA's make of sums of other shapes."""
    batch = np.random.default_rng(0).integers(256, size=(16, 65)).astype(np.int32)
    text, rate = np.tile(batch[0], 3), optax.cosine_decay_schedule(1e-2, 20)

    def make(params):
        return ngram_memory.optimizer_of_parts(params, rate, optimizer)

    model = ngram_memory.LanguageModel(ROWS)
    plain = ngram_memory.Trainer(model, make, batch)
    host = ngram_memory.HostTrainer(model, make, batch, tmp_path / "memory.bin")
    for run in (plain, host):
        run.train("test", text, [batch], num_steps=8)
    np.testing.assert_allclose(host.losses, plain.losses, rtol=1e-5)
    np.testing.assert_allclose(host.history, plain.history, rtol=1e-5)
    assert host.megabytes()[0] < plain.megabytes()[0] - 0.3
    host.trainer.close()
