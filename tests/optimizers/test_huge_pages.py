"""Large tables lie in huge pages after `init`, where the system has them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_sparse_adam as osa
from optax_sparse_adam._jax_extras import huge_pages

from ..helpers.native import flags_of_memory
from ..helpers.support import assert_identical

SIZE = (90_000, 64)  # 23 MB
OPTIMIZERS = {
    "sparse_adam": lambda: osa.sparse_adam(0.1),
    "exact_adam": lambda: osa.exact_adam(0.1),
    "lazy": lambda: osa.lazy(optax.adagrad(0.1)),
    "in a chain": lambda: optax.chain(osa.rowwise_adagrad(0.1), optax.identity()),
}


def is_advised(x):
    return "hg" in flags_of_memory(x.unsafe_buffer_pointer() + x.nbytes // 2)


@pytest.fixture
def advice(monkeypatch):
    """What the system was asked for, as `(begin, bytes, advice)`."""
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *x: asked.append(x))
    return asked


@pytest.mark.skipif(huge_pages._madvise() is None, reason="no huge pages here")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_are_in_huge_pages(name):
    table = jnp.arange(np.prod(SIZE), dtype="float32").reshape(SIZE)
    place, before = table.unsafe_buffer_pointer(), np.array(table)
    OPTIMIZERS[name]().init({"table": table})
    assert table.unsafe_buffer_pointer() == place
    assert is_advised(table)
    assert_identical(table, before)


def test_whole_pages_inside_of_an_array(advice):
    table = jnp.ones(SIZE)
    osa.sparse_adam(0.1).init(table)
    first, last = table.unsafe_buffer_pointer(), 0
    last = first + table.nbytes
    assert [x[2] for x in advice] == [14, 25]
    for begin, size, _ in advice:
        assert begin % 2**21 == size % 2**21 == 0
        assert first <= begin < first + 2**21
        assert last - 2**21 < begin + size <= last


def test_state_of_an_optimiser_of_optax(advice):
    table = jnp.ones(SIZE)
    state = osa.lazy(optax.adam(0.1)).init(table)
    large = [x for x in jax.tree.leaves((table, state)) if x.nbytes > 2**24]
    places = {x.unsafe_buffer_pointer() // 2**21 + 1 for x in large}
    assert len(large) == 3
    assert {begin // 2**21 for begin, *_ in advice} <= places | {x - 1 for x in places}
    assert len(advice) == 6


def test_what_is_passed_over(advice):
    """Small arrays, NumPy's, keys, those of programs and of several devices."""
    osa.sparse_adam(0.1).init({"small": jnp.ones((60_000, 64)), "numpy": np.ones(SIZE)})
    huge_pages.use_huge_pages([jax.random.split(jax.random.key(0), 2_500_000), "text"])
    if jax.device_count() > 1:
        mesh = Mesh(np.array(jax.devices()[:2]), "x")
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        huge_pages.use_huge_pages(jax.device_put(np.ones(SIZE, "float32"), sharding))
    jax.eval_shape(osa.lazy(optax.adam(0.1)).init, jnp.ones(SIZE))
    jax.jit(osa.exact_adam(0.1).init).lower(jnp.ones(SIZE))
    assert advice == []


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_systems_without(tmp_path, monkeypatch, setting):
    """Their owner's wish, which the system would not heed, or no such file."""
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "enabled")
    assert huge_pages._madvise.__wrapped__() is None
    monkeypatch.setattr(huge_pages, "_madvise", huge_pages._madvise.__wrapped__)
    huge_pages.use_huge_pages(jnp.ones(SIZE))


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems(monkeypatch, platform):
    monkeypatch.setattr(huge_pages.sys, "platform", platform)
    assert huge_pages._madvise.__wrapped__() is None
