"""Records of host tables by threads: as NumPy takes and puts them."""

import numpy as np
import pytest

from optax_sparse_adam.native import _build, _library, _records


def arrays(words, dtype, count, seed=0):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 2**16, (5000, words)).astype(dtype)
    rows = np.sort(rng.choice(5000, count, replace=False))
    return table, rows, rng.integers(0, 2**16, (count, words)).astype(dtype)


@pytest.fixture(params=["threads", "numpy"])
def by(request, monkeypatch):
    """With the library, and where there is none."""
    functions = None
    if request.param == "threads":
        if not _build.compiler():
            pytest.skip("there is no C++ compiler")
        (library,) = request.getfixturevalue("cache").rglob("*.so")
        functions = _records.functions_of(library)
    monkeypatch.setattr(_records, "_functions", lambda: functions)
    monkeypatch.setattr(_records, "_FEWEST_BYTES", 0)


@pytest.mark.parametrize("words", [1, 3, 129, 700])
@pytest.mark.parametrize("count", [1, 2, 1500, 5000])
def test_as_numpy(by, words, count):
    table, rows, records = arrays(words, np.uint32, count)
    expected, out = table.copy(), np.empty_like(records)
    _records.take(table, rows, out)
    np.testing.assert_array_equal(out, expected[rows])
    for some in (rows, rows.astype(np.int32), rows[::-1]):
        _records.put(table, some, records)
        expected[some] = records
        np.testing.assert_array_equal(table, expected)
        _records.take(table, some, out)
        np.testing.assert_array_equal(out, records)


def test_in_a_file(by, tmp_path):
    table, rows, records = arrays(9, np.uint32, 700)
    shape = table.shape
    mapped = np.memmap(tmp_path / "t", np.uint32, "w+", shape=shape)
    mapped[...] = table
    _records.put(mapped, rows, records)
    mapped.flush()
    table[rows] = records
    read = np.fromfile(tmp_path / "t", np.uint32).reshape(shape)
    np.testing.assert_array_equal(read, table)
    out = np.empty_like(records)
    _records.take(np.memmap(tmp_path / "t", np.uint32, "r", shape=shape), rows, out)
    np.testing.assert_array_equal(out, records)


def test_what_the_library_does_not_take(by):
    """NumPy's answer, and its errors."""
    table, rows, records = arrays(4, np.uint32, 100)
    out, expected = np.empty_like(records), table.copy()
    with pytest.raises(IndexError, match="out of bounds"):
        _records.take(table, np.array([1, 5000]), out[:2])
    _records.take(table, rows - 5000, out)
    np.testing.assert_array_equal(out, expected[rows])
    _records.take(table[:, ::2], rows, out[:, :2])
    np.testing.assert_array_equal(out[:, :2], expected[rows, ::2])
    _records.put(table, rows, records.astype(np.uint16))
    expected[rows] = records.astype(np.uint16)
    np.testing.assert_array_equal(table, expected)
    _records.put(table, np.zeros(0, np.int64), records[:0])
    np.testing.assert_array_equal(table, expected)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _records.put(table, rows, records)
    np.testing.assert_array_equal(table, expected)


def test_xla_is_told_nothing(cache, monkeypatch):
    """A process with several devices may register another library later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(_library, "register", None)  # raises
    assert _records._functions.__wrapped__() is not None
    monkeypatch.setenv("OPTAX_SPARSE_ADAM_NATIVE", "0")
    assert _records._functions.__wrapped__() is None
