"""examples/splats.py and on_disk.py: as a user meets them, and their parts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa

from ..helpers.examples import assert_one_clear_line, load_example, run_example
from ..helpers.support import assert_close, assert_identical

pytestmark = pytest.mark.slow

splats, on_disk = load_example("splats"), load_example("on_disk")


@pytest.fixture(autouse=True)
def default_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_splats_has_the_losses_of_dense_adam(tmp_path):
    options = ["--gaussians", 20_000, "--steps", 12, "--dense-steps", 12]
    stdout = run_example("splats", *options, cwd=tmp_path).stdout
    found = re.findall(r"^(osa|optax)\.\S+.*? ms +([\d.]+) ms +([\d.]+)$", stdout, re.M)
    assert [name for name, *_ in found] == ["osa", "optax"]
    exact, dense = (float(loss) for *_, loss in found)
    assert abs(exact - dense) < 2e-3 * dense  # splits are by rounded numbers
    assert (tmp_path / "splats.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_patch_is_a_sum_of_gaussians():
    rng = np.random.default_rng(0)
    rows = {
        "position": 40 + 16 * rng.random((5, 2)),
        "log_size": rng.normal(size=(5, 2)) * 0.3,
        "angle": rng.random((5, 1)),
        "colour": rng.random((5, 3)),
        "weight": rng.random((5, 1)),
    }
    expected = np.zeros((16, 16, 3))
    for i in range(5):
        size, angle = np.exp(rows["log_size"][i]), rows["angle"][i, 0]
        turn = np.array(
            [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        )
        for y in range(16):
            for x in range(16):
                away = turn @ (
                    np.array([40 + y + 0.5, 40 + x + 0.5]) - rows["position"][i]
                )
                density = np.exp(-0.5 * np.sum((away / size) ** 2))
                expected[y, x] += density * rows["weight"][i] * rows["colour"][i]
    corner = jnp.array([40.0, 40.0])
    found = splats.render({k: jnp.float32(x) for k, x in rows.items()}, corner)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_on_disk_resumes_bit_for_bit(tmp_path):
    def run(folder, *options):
        options = ["--rows", 20_000, "--folder", tmp_path / folder, *options]
        return run_example("on_disk", *options, cwd=tmp_path).stdout

    assert "memory of the process" in run("whole", "--steps", 8)
    run("parts", "--steps", 5)
    run("parts", "--steps", 3, "--resume")
    trees = []
    for folder in ("whole", "parts"):
        with on_disk.new_trainer(tmp_path / folder, 20_000, None, True) as trainer:
            assert trainer.steps == 8
            trees.append(jax.tree.map(np.array, (trainer.params, trainer.state)))
    assert_identical(*trees)


def test_on_disk_trains_what_memory_would(tmp_path):
    """Within what other flags of XLA's make of sums: these are not a user's."""
    with on_disk.new_trainer(tmp_path, 3000, None) as trainer:
        params = jax.tree.map(jnp.array, trainer.params)
        state = jax.tree.map(jnp.array, trainer.state)
        batches = [on_disk.draw(3000, number) for number in range(6)]
        losses = [float(value) for value in trainer.run(batches)]
        step = osa.make_train_step(on_disk.loss, osa.sparse_adam(1e-2))
        for found, batch in zip(losses, batches, strict=True):
            params, state, value = step(params, state, *batch)
            np.testing.assert_allclose(found, value, rtol=1e-5)
        assert_close(trainer.params["table"], params["table"], 1e-5, magnitude=1.0)


def test_wrong_options(tmp_path):
    done = run_example("on_disk", "--resume", cwd=tmp_path, check=False)
    assert_one_clear_line(done, "--resume", "--folder")
    done = run_example("splats", "--steps", 1, cwd=tmp_path, check=False)
    assert_one_clear_line(done, "--steps", "at least")
