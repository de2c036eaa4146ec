"""Keys of vocabularies by the library: as NumPy finds, counts and inserts them."""

import numpy as np
import pytest

from optax_sparse_adam._vocabulary.index import Index, table_of
from optax_sparse_adam._vocabulary.order import by_hits, by_last
from optax_sparse_adam._vocabulary.store import Changes, Store
from optax_sparse_adam.native import _build, _keys


@pytest.fixture
def both(cache, monkeypatch):
    """Calls a function with the library, and without it."""
    if not _build.compiler():
        pytest.skip("there is no C++ compiler")
    (library,) = cache.rglob("*.so")
    functions = _keys.functions_of(library)
    monkeypatch.setattr(_keys, "_FEWEST", 0)

    def call(function):
        results = []
        for there in (functions, None):
            monkeypatch.setattr(_keys, "_functions", lambda there=there: there)
            results.append(function())
        return results

    return call


def keys(size, seed=0):
    """Different codes, of which 0 is that of no key."""
    codes = np.random.default_rng(seed).integers(1, 2**64, size, np.uint64)
    codes[0] = 0
    assert len(np.unique(codes)) == size
    return codes


def unused(codes):
    return table_of(codes, 0, np.zeros(len(codes), np.int32))


@pytest.mark.parametrize("size", [3, 65, 3000, 40_000])
def test_an_index(both, size):
    """40,000 keys are found by threads, in parts."""
    codes, absent = keys(size), keys(size, 1)[1:]
    rows = np.random.default_rng(2).permutation(size - 1).astype(np.int32) + 1
    asked = np.concatenate([codes[1:], absent, codes[1:9]])

    def expected(there):
        row_of = np.zeros(size, np.int32)
        row_of[there] = there
        return np.concatenate([row_of[1:], 0 * rows, row_of[1:9]])

    def change():
        index = Index(unused(codes))
        cut, mid = size // 3, 2 * size // 3
        assert index.insert(rows[:mid])
        index.remove(rows[:cut])
        found.append((index, expected(rows[cut:mid])))
        index = Index(unused(codes))
        assert index.insert(rows[:cut])
        assert index.insert(rows[cut:])
        found.append((index, expected(rows)))

    found = []
    both(change)
    assert len(found) == 4
    for index, wanted in found:  # either finds what the other has inserted
        for rows_of in both(lambda index=index: index.find(asked)):
            np.testing.assert_array_equal(rows_of, wanted)
            assert rows_of.dtype == np.int32
        for rows_of in both(lambda index=index: index.find(asked[::-1])):
            np.testing.assert_array_equal(rows_of, wanted[::-1])
        for nothing in both(lambda index=index: index.find(asked[:0])):
            assert nothing.shape == (0,)


def test_a_slot_with_a_row_that_there_is_not(both):
    """What another thread writes meanwhile is never followed outside of the table."""
    codes = keys(50)
    index = Index(unused(codes))
    assert index.insert(np.arange(1, 50, dtype=np.int32))
    for row in (50, 2**31 - 1, -1, -(2**31)):
        index._slots[:] = row
        assert not both(lambda: index.find(codes[1:]))[0].any()


def test_the_code_of_row_0(both):
    """A key that has it is found in its second slot, though the first one is free."""
    index = Index(np.array([[7, 0], [7, 0]], np.uint64))
    seven = index.codes[1:]
    assert not any(x.any() for x in both(lambda: index.find(seven)))
    index._slots[index._second(index._mix(seven))] = 1
    assert [x.tolist() for x in both(lambda: index.find(seven))] == [[1], [1]]


def test_keys_that_find_no_room(both):
    """Of three for one pair of slots one is nowhere at last."""
    codes = np.random.default_rng(0).integers(1, 2**64, 3000, np.uint64)

    def pairs(index):
        return 16 * index._first(index._mix(codes)) + index._second(index._mix(codes))

    def insert():
        index = Index(np.zeros((6, 2), np.uint64))
        assert len(index._slots) == 16
        numbers, counts = np.unique(pairs(index), return_counts=True)
        counts[numbers // 16 == numbers % 16] = 0  # not a pair, but one slot
        alike = codes[pairs(index) == numbers[counts.argmax()]][:3]
        index.codes[1:4] = alike
        assert len(alike) == 3
        rows = np.arange(1, 4, dtype=np.int32)
        return index.insert(rows[:2]), index.insert(rows[2:])

    assert both(insert) == [(True, False)] * 2


@pytest.mark.parametrize("size", [1, 17, 9000])
@pytest.mark.parametrize("different", [1, 40, 20_000])
def test_distinct(both, size, different):
    rng = np.random.default_rng(size)
    codes = keys(different + 1)[rng.integers(0, different + 1, size)]
    index = Index(unused(keys(9, 1)))
    assert index.insert(np.array([8], np.int32))
    asked = np.insert(codes, [0, size // 2], index.codes[8])  # two that are there
    (rows, *_, by_library), (*_, by_numpy) = both(lambda: index.look_up(asked))
    assert np.count_nonzero(rows) == 2
    for a, b in zip(by_library, by_numpy, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    first, counts, of = by_library
    np.testing.assert_array_equal(first[of], codes)
    assert counts.sum() == size
    assert (np.diff([codes.tolist().index(x) for x in first.tolist()[:50]]) > 0).all()


def test_touch(both):
    """Rows that are there several times; hits that are at their end."""
    rng, most = np.random.default_rng(0), 2**31 - 1
    rows = rng.integers(1, 500, 3000).astype(np.int32)
    last, hits = rng.integers(0, 9, (2, 500)).astype(np.int32)
    hits[0], hits[1:] = 0, hits[1:] + 1
    hits[[3, 4, 5]] = most, most - 3000, most - 2999

    def touch():
        store = Store(keys(500), last.copy(), hits.copy(), by_last)
        changes = Changes()
        _, touched, uses, absent, _ = store.index.look_up(keys(500)[rows])
        np.testing.assert_array_equal(touched, rows)
        assert not len(absent)
        store.touch(changes, touched, uses, 9)
        after = store.last.copy(), store.hits.copy()
        changes.undo(finished=True)
        return *after, store.last, store.hits

    for new_last, new_hits, old_last, old_hits in both(touch):
        counts = np.bincount(rows, minlength=500)
        is_there = counts > 0
        assert is_there[[3, 4, 5]].all()
        counts[[3, 5]] = 0
        np.testing.assert_array_equal(new_last, np.where(is_there, 9, last))
        np.testing.assert_array_equal(new_hits, hits + counts)
        np.testing.assert_array_equal(old_last, last)
        np.testing.assert_array_equal(old_hits, hits)


@pytest.mark.parametrize("size", [1, 17, 9000])
@pytest.mark.parametrize("share", [0, 0.02, 1])
def test_look_up(both, size, share):
    """Uses of rows that are there; and where no row is."""
    rng = np.random.default_rng(size)
    last, hits = rng.integers(1, 2**31, (2, 500)).astype(np.int32)
    rows = rng.integers(1, 500, size).astype(np.int32)
    rows[rng.random(size) < share] = 0
    store = Store(keys(500), last, np.where(np.arange(500) > 0, hits, 0), by_last)
    asked = np.where(rows > 0, keys(500)[rows], keys(2, 1)[1])
    for found, touched, uses, absent, _ in both(lambda: store.index.look_up(asked)):
        np.testing.assert_array_equal(found, rows)
        np.testing.assert_array_equal(touched, rows[rows > 0])
        np.testing.assert_array_equal(absent, np.flatnonzero(rows == 0))
        np.testing.assert_array_equal(uses.view(np.int32)[::2], last[touched])
        np.testing.assert_array_equal(uses.view(np.int32)[1::2], hits[touched])
        assert (touched.dtype, uses.dtype) == (np.int32, np.int64)
        assert not np.shares_memory(touched, found)


@pytest.mark.parametrize("size", [1, 17, 900])
def test_replace(both, size):
    """Rows that are free get a code, and others another one."""
    rng = np.random.default_rng(size)
    rows = rng.permutation(2 * size).astype(np.int32) + 1
    old, new = keys(2 * size + 1), keys(size + 1, 1)[1:]
    hits, replaced = rng.integers(0, 2**31, size).astype(np.int32), rows[:size]

    def replace():
        table = unused(old)
        index = Index(table)
        free = size // 3
        assert index.insert(rows[free:])
        assert index.replace(replaced, free, new, 7, hits)
        return table, index.find(new), index.find(old[1:])

    for table, found, gone in both(replace):
        np.testing.assert_array_equal(table[replaced, 0], new)
        last, new_hits = table.view(np.int32)[replaced, 2:].T
        np.testing.assert_array_equal(new_hits, hits)
        assert (last == 7).all()
        np.testing.assert_array_equal(table[rows[size:], 0], old[rows[size:]])
        np.testing.assert_array_equal(found, replaced)
        row_of = np.where(np.isin(np.arange(2 * size + 1), rows[size:]), 1, 0)
        np.testing.assert_array_equal(gone, (row_of * np.arange(2 * size + 1))[1:])


def test_arrays_that_are_read_only(both):
    """As those of JAX are; and without an entry."""
    codes = keys(50)
    index = Index(unused(codes))
    for i in (1, 25, 50):
        rows = np.arange(1, i, dtype=np.int32)
        rows.flags.writeable = codes.flags.writeable = False
        for inserted in both(lambda rows=rows: index.rebuilt(rows)):
            for found in both(lambda index=inserted: index.find(codes[1:])):
                np.testing.assert_array_equal(found[: i - 1], rows)
                assert not found[i - 1 :].any()
            for found, *_ in both(lambda index=inserted: index.look_up(codes[1:])):
                np.testing.assert_array_equal(found[: i - 1], rows)


@pytest.mark.parametrize("score", [by_last, by_hits])
@pytest.mark.parametrize("rows_of_now", [False, True])
def test_lowest(both, score, rows_of_now):
    """While rows change, some are free, and some are there at this step."""

    def take():
        rng = np.random.default_rng(0)
        last, hits = rng.integers(0, 40, (2, 3000)).astype(np.int32)
        hits[0] = 0
        store = Store(keys(3000), last, hits, score)
        taken = []
        for now in range(50, 80):
            rows = rng.integers(1, 3000, 40).astype(np.int32)
            store.last[rows], store.hits[rows] = now, rng.integers(0, 60, 40)
            store.order.add(rows, now)
            if not rows_of_now:
                store.last[rows] -= store.last[rows] == now
            lowest = store.order.take(20, now)
            usable = np.flatnonzero((store.hits > 0) & (store.last != now))
            by = np.lexsort((usable, score(store.last, store.hits)[usable]))
            np.testing.assert_array_equal(lowest, usable[by[:20]])
            assert lowest.dtype == np.int32
            store.hits[lowest] = 0
            taken.append(lowest)
        return taken

    np.testing.assert_array_equal(*both(take))
