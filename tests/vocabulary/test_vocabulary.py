"""`Vocabulary` as a user meets it: keys, batches, steps, checkpoints, threads."""

import copy
import pickle
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_sparse_adam as osa
from optax_sparse_adam._vocabulary import index

from ..helpers.support import TOLERANCE, assert_close, assert_identical

pytestmark = pytest.mark.usefixtures("by")

LARGE = np.array([0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1], np.int64)


# --- keys ---


@pytest.mark.parametrize(
    "keys",
    [
        np.concatenate([LARGE, -LARGE[1:], [-(2**63)]]),
        np.append(LARGE.astype(np.uint64), [2**63, 2**64 - 1]).astype(np.uint64),
        np.array([-1, 0, 2**31 - 1, -(2**31)], np.int32),
        np.array([0, 255], np.uint8),
        np.array([1, -2], ">i8"),
        np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2].swapaxes(0, 2),
        np.array(7),
        [3, 2**40],
        ["a", "b", "a longer one", "", "Käse", "a\0", "\0"],
        [b"a", b"b\0", b"b", b"\xff\xfe"],
        np.array(["x", "yy", "", "ü" * 9]),
        np.array([b"x", b"yy", b""]),
        np.array([["x"], ["yy"]], object),
        np.array(
            ["x", "a long string that has a place of its own"], np.dtypes.StringDType()
        ),
        jnp.arange(5),
    ],
    ids=lambda x: str(x.dtype) if hasattr(x, "dtype") else type(x[0]).__name__,
)
def test_each_key_has_a_row_of_its_own(keys):
    shape = np.shape(keys) if hasattr(keys, "dtype") else (len(keys),)
    vocab = osa.Vocabulary(64)
    assert not vocab.find(keys).any()
    rows, fresh, _ = vocab.assign(keys, 0)
    assert rows.shape == shape
    assert rows.dtype == np.int32
    assert sorted(rows.ravel()) == [*range(1, rows.size + 1)]
    np.testing.assert_array_equal(fresh, rows.ravel())
    np.testing.assert_array_equal(vocab.find(keys), rows)
    one = keys[0] if isinstance(keys, list) else np.asarray(keys).reshape(-1)[0]
    assert vocab.find(one).shape == ()
    assert vocab.find(one) == rows.reshape(-1)[0]


def test_integers_of_all_types_are_one_key():
    vocab = osa.Vocabulary(9)
    rows = vocab.assign(np.array([5, -6, 2**40]), 0).rows
    np.testing.assert_array_equal(vocab.find(np.array([5, -6], np.int32)), rows[:2])
    np.testing.assert_array_equal(vocab.find(np.array([5], np.uint8)), rows[:1])
    np.testing.assert_array_equal(
        vocab.find(np.array([5, 2**40], np.uint64)), rows[::2]
    )


def fnv(data):
    code = 0xCBF29CE484222325
    for byte in data:
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return code


def test_strings_are_hashed_by_fnv_1a():
    known = {
        "": 0xCBF29CE484222325,
        "a": 0xAF63DC4C8601EC8C,
        "foobar": 0x85944171F73967E8,
    }
    assert osa.hash_keys([*known]).tolist() == [*known.values()]
    rng = np.random.default_rng(0)
    words = [
        "".join(map(chr, rng.integers(1, 0x7FF, n))) for n in rng.integers(0, 40, 99)
    ]
    expected = [fnv(word.encode()) for word in words]
    assert len({*expected}) > 90
    for keys in (words, [word.encode() for word in words], np.array(words)):
        assert osa.hash_keys(keys).tolist() == expected
    as_bytes = np.array([word.encode() for word in words])
    assert osa.hash_keys(as_bytes.reshape(3, 33)).tolist() == [
        expected[i : i + 33] for i in (0, 33, 66)
    ]
    assert osa.hash_keys("foobar") == known["foobar"]
    assert osa.hash_keys([]).shape == (0,)
    with pytest.raises(
        TypeError, match=r"strings or bytes .* NoneType None .* and no hash"
    ):
        osa.hash_keys([None])
    assert osa.hash_keys(np.array(["", ""])).tolist() == [known[""]] * 2
    ascii_only = ["".join(map(chr, rng.integers(32, 127, n))) for n in range(20)]
    assert osa.hash_keys(np.array(ascii_only)).tolist() == [
        fnv(word.encode()) for word in ascii_only
    ]
    vocab = osa.Vocabulary(200)
    rows = vocab.assign(words, 0).rows
    np.testing.assert_array_equal(vocab.find(osa.hash_keys(words)), rows)
    np.testing.assert_array_equal(vocab.assign(words, 1).rows, rows)


REFUSED = [
    (np.array([0.5, 1]), TypeError, "float64"),
    (np.array([True]), TypeError, "bool"),
    ([2**63, -1], TypeError, "float64|object"),
    ([2**64], TypeError, "object"),
    (np.array([1, 2], object), TypeError, "int 1"),
    (np.array(["a", None], object), TypeError, "NoneType None"),
    (["a", 1], TypeError, "int 1"),
    (np.array(["2020-01-01"], np.datetime64), TypeError, "datetime64"),
    (np.ma.array([1, 2], mask=[0, 1]), TypeError, r"mask=~keys\.mask"),
    (np.array([1j]), TypeError, "complex"),
    ([[1], [2, 3]], ValueError, "lists of one length, got a list"),
    pytest.param(
        *(memoryview(b"ab"), TypeError, r"memoryview for an array .*bytes\(key\)"),
        id="memoryview",  # its text is an address, another one in each process
    ),
    ([[bytearray(b"ab")], [bytearray(b"cd")]], TypeError, "bytearray for an array"),
    (["a", "\ud83d"], ValueError, r"'\\ud83d' has none.*surrogatepass"),
]


@pytest.mark.parametrize(("keys", "error", "words"), REFUSED, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("function", ["assign", "find", "hash_keys"])
def test_keys_that_would_be_cut_are_refused(function, keys, error, words):
    vocab = osa.Vocabulary(9)
    call = {
        "assign": lambda: vocab.assign(keys, 0),
        "find": lambda: vocab.find(keys),
        "hash_keys": lambda: osa.hash_keys(keys),
    }[function]
    with pytest.raises(error, match=rf"(?s)^{function} .*({words})"):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: osa.Vocabulary(2.5), "Vocabulary needs rows.* integer, got 2.5"),
        (lambda: osa.Vocabulary(9, ttl="5"), "Vocabulary needs ttl.*'5' of type str"),
        (
            lambda: osa.Vocabulary(9).assign([1], 1.0),
            "assign needs a step.*1.0 of type",
        ),
        (lambda: osa.Vocabulary(9).grow(10.0), "grow needs rows as an integer"),
        (
            lambda: osa.Vocabulary(9).changed_since(None),
            "changed_since needs a step as an integer, got None",
        ),
        (
            lambda: osa.Vocabulary(9).arrays_before("1"),
            "arrays_before needs a step.*'1' of type str",
        ),
    ],
    ids=["rows", "ttl", "step", "grow", "since", "before"],
)
def test_no_integers(call, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


def test_traced_keys_are_refused():
    vocab = osa.Vocabulary(9)
    with pytest.raises(TypeError, match=r"^find is called on the host.*outside of jit"):
        jax.jit(lambda keys: vocab.find(keys))(jnp.arange(3))


def test_signed_and_unsigned_keys_are_told_apart():
    """-1 and 2**64 - 1 have the same bits."""
    vocab = osa.Vocabulary(9)
    vocab.assign(np.array([-1, 5]), 0)
    for call in (vocab.find, lambda keys: vocab.assign(keys, 1)):
        with pytest.raises(ValueError, match=f"got {2**64 - 1}"):
            call(np.array([5, 2**64 - 1], np.uint64))
        with pytest.raises(TypeError, match="cannot take strings here"):
            call(["a"])
        with pytest.raises(TypeError, match=r"got one with int 5 in it\. Integers"):
            call(np.array([5], object))
    vocab = osa.Vocabulary(9)
    vocab.assign(np.array([2**64 - 1], np.uint64), 0)
    for call in (vocab.find, lambda keys: vocab.assign(keys, 1)):
        with pytest.raises(ValueError, match="got -1"):
            call(np.array([5, -1]))
    assert vocab.assign(np.array([1 << 63], np.uint64), 1).evicted.dtype == np.uint64


def test_keys_that_the_index_uses_for_nobody():
    """Free slots stand for row 0, where a code is that of no key; somebody has it."""
    vocab = osa.Vocabulary(9)
    assert vocab.arrays["keys"][0] == 0
    for step in range(20):
        keys = np.array([0, 1 + step % 2], np.uint64)
        assert not vocab.find(keys + np.uint64(8)).any()
        rows = vocab.assign(keys, step).rows
        assert rows.tolist() == [1, 2 + step % 2]
        np.testing.assert_array_equal(vocab.find(keys), rows)
    again = osa.Vocabulary(9)
    again.restore(vocab.arrays)
    assert again.find([0, 1, 2, 3]).tolist() == [1, 2, 3, 0]


def test_keys_that_are_chosen_to_share_their_slots():
    """The index finds another hash, and then more slots."""
    found = index.Index(np.zeros((41, 2), np.uint64))
    rng, chosen = np.random.default_rng(0), []
    while len(chosen) < 40:
        keys = rng.integers(2**64, size=100_000, dtype=np.uint64)
        mixed = found._mix(keys)
        both = found._first(mixed), found._second(mixed)
        chosen += keys[(both[0] < 4) & (both[1] < 4)].tolist()
    keys = np.array(chosen[:40], np.uint64)
    vocab = osa.Vocabulary(41)
    rows = vocab.assign(keys, 0).rows
    np.testing.assert_array_equal(rows, np.arange(1, 41))
    np.testing.assert_array_equal(vocab.find(keys), rows)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(vocab)).find(keys), rows)


def test_masks_and_padding():
    keys = np.array([[3, -1], [-1, 4]])
    for vocab, mask in (
        (osa.Vocabulary(9), keys >= 0),
        (osa.Vocabulary(9, padding=-1), None),
        (osa.Vocabulary(9, padding=-1), np.array([[True, True], [False, True]])),
    ):
        rows, fresh, _ = vocab.assign(keys, 0, mask=mask)
        assert rows.tolist() == vocab.find(keys, mask=mask).tolist() == [[1, 0], [0, 2]]
        assert fresh.tolist() == [1, 2]
    words = osa.Vocabulary(9, padding="<pad>")
    assert words.assign(["<pad>", "a", "<pad>"], 0).rows.tolist() == [0, 1, 0]
    with pytest.raises(
        ValueError, match=r"mask of bool in the shape of the keys, \(2, 2\)"
    ):
        vocab.assign(keys, 1, mask=[True, False])
    with pytest.raises(TypeError, match="assign needs a plain array, got a masked"):
        vocab.assign(np.arange(3), 0, mask=np.ma.ones(3, bool))
    with pytest.raises(ValueError, match="assign needs a mask of bool"):
        vocab.assign(keys, 1, mask=np.ones((2, 2)))


# --- batches ---


def test_a_full_table_says_so_and_does_nothing():
    """Elsewhere keys without a place get zeros in silence."""
    vocab = osa.Vocabulary(5)
    vocab.assign([1, 2, 3], 0)
    held = vocab.arrays
    with pytest.raises(ValueError, match="5 keys for 4 rows"):
        vocab.assign([2, 7, 8, 9, 10, 7], 1)
    assert_identical(vocab.arrays, held, "after the error")
    rows, _, evicted = vocab.assign([2, 7, 8, 9, 2, 2], 1)
    assert sorted({*rows.tolist()}) == [1, 2, 3, 4]
    assert evicted.tolist() == [1, 3]  # not 2, which is in this batch
    with pytest.raises(ValueError, match="1,001 keys for 1,000 rows"):
        osa.Vocabulary(1001).assign(np.arange(1001), 0)


@pytest.mark.parametrize("score", ["last", "hits"])
def test_features_that_share_a_table_do_not_evict_each_other(score):
    """Two batches of one step: what the first one has got, it still has in the step."""
    vocab = osa.Vocabulary(9, score=score)
    vocab.assign([1, 1, 2, 2, 3, 3, 4, 4], 0)
    first = vocab.assign([11, 12, 13, 1], 1)
    second = vocab.assign([21, 22, 1, 2], 1)
    assert not len(first.evicted)
    assert second.evicted.tolist() == [3]
    np.testing.assert_array_equal(vocab.find([11, 12, 13, 1]), first.rows)
    with pytest.raises(ValueError, match="9 keys for 8 rows"):
        vocab.assign([31, 32], 1)
    again = pickle.loads(pickle.dumps(vocab))
    with pytest.raises(ValueError, match="9 keys for 8 rows"):
        again.assign([31, 32], 1)
    assert again.assign([31], 1).evicted.tolist() == [4]
    assert again.assign([32], 2).evicted.tolist() == {"last": [1], "hits": [22]}[score]


def test_rare_keys_share_the_row_of_unknown_ones():
    vocab = osa.Vocabulary(9, min_hits=3, ttl=10, waiting=4)
    assert vocab.assign([5, 5, 6, 7, 7, 7], 0).rows.tolist() == [0, 0, 0, 1, 1, 1]
    rows, fresh, _ = vocab.assign([6, 5], 5)
    assert rows.tolist() == [0, 2]  # hits of all batches count
    assert fresh.tolist() == [2]
    assert vocab.assign([6], 16).rows.tolist() == [0]  # two are forgotten
    assert vocab.find([6, 7]).tolist() == [0, 0]  # 7 was not there for `ttl` steps
    with pytest.raises(ValueError, match=r"less than 3 hits: 5 keys .* are 4 places"):
        vocab.assign(np.arange(50, 55), 17)


def test_keys_that_were_not_there_for_ttl_steps_go():
    vocab = osa.Vocabulary(9, ttl=3)
    vocab.assign([1, 2, 3], 0)
    vocab.assign([2], 2)
    assert not len(vocab.assign([], 3).evicted)
    rows, fresh, evicted = vocab.assign([3, 4], 4)
    assert evicted.tolist() == [1]  # 3 is in the batch
    assert (rows.tolist(), fresh.tolist()) == ([3, 1], [1])
    assert vocab.assign([], 100).evicted.tolist() == [4, 2, 3]  # by row
    assert len(vocab) == 0
    vocab = osa.Vocabulary(9, ttl=80)  # looked for every ten steps
    gone = [len(vocab.assign([1] if not s else [], s).evicted) for s in range(100)]
    assert gone.index(1) == 90


def test_hits_do_not_overflow():
    vocab = osa.Vocabulary(4, score="hits")
    vocab.assign([1, 2, 3], 0)
    arrays = vocab.arrays
    arrays["hits"][1] = 2**31 - 4
    vocab.restore(arrays)
    for step in range(1, 5):
        vocab.assign([1, 1, 2], step)
        assert vocab.arrays["hits"].min() >= 0
    assert vocab.assign([9], 5).evicted.tolist() == [3]
    assert vocab.assign([8], 6).evicted.tolist() == [9]


def test_steps_do_not_go_back():
    vocab = osa.Vocabulary(9)
    vocab.assign([1], 5)
    vocab.assign([2], np.int64(5))
    for step in (4, -1, 2**31):
        with pytest.raises(ValueError, match=rf"from 5, .*got {step}\."):
            vocab.assign([1], step)
    with pytest.raises(TypeError, match="float"):
        vocab.assign([1], 6.0)


def test_a_score_that_cannot_be_ordered_changes_nothing():
    scores = {
        "NaN": lambda last, hits: np.where(hits > 1, np.nan, last),
        r"array of int64 of shape \(\)": lambda last, hits: int(last[0]),
        "array of <U1": lambda last, hits: np.full(len(last), "a"),
    }
    for words, score in scores.items():
        vocab = osa.Vocabulary(4, score=score)
        vocab.assign([1, 1, 2, 3], 0)
        held = vocab.arrays
        with pytest.raises(ValueError, match=words):
            vocab.assign([4, 2], 1)
        assert_identical(vocab.arrays, held, "after the error")
        assert vocab.find([1, 2, 3, 4]).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 1}, "rows, of which one is that of unknown keys, from 2"),
        ({"rows": 2**31}, "rows"),
        ({"min_hits": 0}, "min_hits from 1"),
        ({"ttl": 0}, "ttl from 1"),
        ({"waiting": 0}, "waiting from 1"),
        ({"tombstones": -1}, "tombstones from 0"),
        ({"score": "lru"}, "'lru'"),
        ({"score": ["last"]}, "function of both, got .'last'."),
    ],
    ids=str,
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=f"^Vocabulary needs .*{words}"):
        osa.Vocabulary(**{"rows": 9, **options})


def test_padded_rows_have_few_lengths():
    fresh = osa.Vocabulary(400).assign(np.arange(300), 0).fresh
    assert len(fresh) == 300
    padded = fresh.padded(64)
    assert padded.shape == (512,)
    np.testing.assert_array_equal(padded[:300], fresh)
    assert (padded[300:] == -1).all()
    assert fresh[:0].padded(64).shape == fresh[:64].padded(64).shape == (64,)
    assert fresh[:65].padded(64).shape == (128,)
    with pytest.raises(ValueError, match="at least 1"):
        fresh.padded(0)
    with pytest.raises(
        TypeError, match=r"padded needs a length as an integer, got 64\.0"
    ):
        fresh.padded(64.0)


# --- steps ---


def test_a_row_has_nothing_of_the_key_before(compilations):
    """Adam of a table of six rows and twelve keys, beside a dictionary of vectors."""
    width, rate, vocab = 3, 0.1, osa.Vocabulary(7)
    tx = osa.sparse_adam(rate)
    params = {"table": jnp.ones((7, width))}
    step = osa.make_train_step(lambda p, rows: jnp.sum((p["table"][rows] - 2) ** 2), tx)
    begin = jax.jit(
        lambda *args: osa.reset_rows(
            tx, *args[:2], {"table": args[2]}, {"table": args[3]}
        )
    )
    state, of = tx.init(params), {}
    rng = np.random.default_rng(0)
    for number in range(30):
        keys = rng.integers(-6, 6, 5)
        rows, fresh, evicted = vocab.assign(keys, number)
        ids = fresh.padded(8)
        params, state = begin(params, state, ids, jnp.ones((8, width)))
        params, state, _ = step(params, state, rows)
        if number == 1:
            compiled = len(compilations)
        count = number + 1
        for key in evicted.tolist():
            del of[key]
        for key in {*keys.tolist()}:
            x, mu, nu = of.get(key, (1.0, 0.0, 0.0))
            grad = 2 * (x - 2) * np.count_nonzero(keys == key)
            mu, nu = 0.9 * mu + 0.1 * grad, 0.999 * nu + 0.001 * grad**2
            by = rate * mu / (1 - 0.9**count)
            of[key] = x - by / (np.sqrt(nu / (1 - 0.999**count)) + 1e-8), mu, nu
    assert len(compilations) == compiled
    table = np.asarray(params["table"])
    assert len(of) == len(vocab) == 6
    for key, (x, *_) in of.items():
        assert_close(
            table[vocab.find(key)], np.full(width, x), TOLERANCE["float32"].numpy
        )


def test_a_batch_that_is_not_run_leaves_nothing():
    """Without a backward pass, elsewhere, what was allocated stays."""
    options = {"min_hits": 2, "ttl": 50, "score": "hits"}
    vocab, other = osa.Vocabulary(25, **options), osa.Vocabulary(25, **options)
    rng = np.random.default_rng(0)
    for step in range(60):
        keys = rng.integers(60, size=6)
        held = vocab.arrays
        lost = [vocab.assign(rng.integers(60, size=5), step) for _ in range(step % 4)]
        for _ in lost:
            vocab.undo()
        assert_identical(vocab.arrays, held, "after undo")
        for a, b in zip(
            vocab.assign(keys, step), other.assign(keys, step), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        if step == 50:
            vocab.grow(27)
            other.grow(27)
    for _ in range(9):
        vocab.assign([1, 2], 60)
    for _ in range(8):
        vocab.undo()
    with pytest.raises(RuntimeError, match="last 8 calls"):
        vocab.undo()


def test_a_batch_that_is_interrupted_changes_nothing(monkeypatch):
    """By Ctrl-C, when keys have been pushed from their slots and have no others yet."""
    vocab, replace = osa.Vocabulary(3000, min_hits=2, tombstones=9), index.Index.replace
    rng = np.random.default_rng(0)
    keys = rng.permutation(2**20)[:3000]
    news = np.repeat(2**20 + rng.permutation(2**20)[:2000], 2)
    vocab.assign(np.repeat(keys[:2500], 2), 0)
    rows, held, lost = vocab.find(keys), vocab.arrays, []

    def interrupted(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(index, "_ROUNDS", 1)
            assert not replace(self, *args)
        lost.append(np.count_nonzero(self.find(self.codes[self.codes < 2**20]) == 0))
        monkeypatch.setattr(index.Index, "replace", replace)
        raise KeyboardInterrupt

    monkeypatch.setattr(index.Index, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vocab.assign(news, 1)
    assert lost[0] > 10
    assert_identical(vocab.arrays, held, "after the interruption")
    np.testing.assert_array_equal(vocab.find(keys), rows)
    rows, _, evicted = vocab.assign(news, 1)
    assert len({*rows.tolist()}) == 2000
    assert len(evicted) == 1501


# --- checkpoints ---


def run(vocab, steps):
    results = []
    for step in steps:
        keys = np.random.default_rng(step).integers(60, size=25) + step // 2
        results.append(vocab.assign(keys, step))
    return results


@pytest.mark.parametrize("score", ["last", "hits"])
def test_a_resumed_run_is_the_run_that_went_on(tmp_path, score):
    make = lambda: osa.Vocabulary(40, score=score, min_hits=2, ttl=7)  # noqa: E731
    vocab = make()
    run(vocab, range(20))
    np.savez(tmp_path / "vocab.npz", **vocab.arrays)
    saved = {
        "npz": make(),
        "pickle": pickle.loads(pickle.dumps(vocab)),
        "copy": copy.deepcopy(vocab),
        "tree": jax.tree.map(lambda x: x, vocab),
    }
    with np.load(tmp_path / "vocab.npz") as file:
        saved["npz"].restore(file)
    expected = run(vocab, range(20, 40))
    assert sum(len(x.evicted) for x in expected) > 50
    for name, other in saved.items():
        assert_identical(run(other, range(20, 40)), expected, name)
        assert_identical(other.arrays, vocab.arrays, name)


def test_features_are_a_pytree():
    features = {"user": osa.Vocabulary(9, min_hits=2), "item": osa.Vocabulary(5)}
    features["item"].assign([-5, 7], 0)
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(features)
    ]
    assert "['item']['keys']" in paths
    assert "['user']['waiting_hits']" in paths
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), features)
    again = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(features))
    assert again["item"].find([-5, 7, 8]).tolist() == [1, 2, 0]
    assert "of rows: ?," in repr(shapes["item"])
    assert "of rows: 5 with 2 keys" in repr(again["item"])
    leaves, of = jax.tree.flatten(features["item"])
    leaves[0][:] = 0  # a copy
    assert features["item"].find([-5]) == 1
    assert of == jax.tree.structure(osa.Vocabulary(5))


def test_arrays_that_were_cut_are_refused():
    """A device has no 64 bits unless JAX is told to; nothing is said there."""
    vocab = osa.Vocabulary(5)
    vocab.assign([2**40, 1], 0)
    on_device = jax.device_put({"vocab": vocab})["vocab"]
    for call in (lambda: on_device.find([1]), lambda: vocab.restore(on_device.arrays)):
        with pytest.raises(TypeError, match="keys are uint64 of one axis, got uint32"):
            call()
    held = vocab.arrays
    with pytest.raises(ValueError, match="restore needs the arrays keys, last"):
        vocab.restore({name: x for name, x in held.items() if name != "last"})
    with pytest.raises(ValueError, match="at most 4 entries for keys, got 5"):
        osa.Vocabulary(4).restore(held)
    with pytest.raises(
        ValueError, match="grow needs as many rows as there are, 5, or more"
    ):
        vocab.grow(4)


# --- threads ---


def in_threads(functions):
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(x,)) for x in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_find_while_another_thread_assigns():
    """Keys that are always there are always found; others are nobody else's row."""
    stay = np.arange(400)
    vocab = osa.Vocabulary(1000)
    rows = vocab.assign(stay, 0).rows
    done, found = threading.Event(), []

    def assign():
        try:
            for step in range(1, 10_000):
                new = stay + 400 * step
                vocab.assign(np.concatenate([stay, new]), step)
                if step == 40:
                    vocab.grow(1100)
                # A busy machine may begin the other threads late.
                if step >= 80 and len(found) > 20:
                    break
        finally:
            done.set()

    def find():
        while not done.is_set():
            np.testing.assert_array_equal(vocab.find(stay), rows)
            found.append(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        errors = in_threads([assign, find, find, find])
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    assert len(found) > 20


def test_two_threads_do_not_assign_at_once():
    inside, go_on = threading.Event(), threading.Event()

    def slow(last, hits):
        inside.set()
        go_on.wait(60)
        return last

    vocab = osa.Vocabulary(3, score=slow)
    vocab.assign([1, 2], 0)
    errors = []

    def other():
        inside.wait(60)
        for call in (lambda: vocab.assign([4], 1), vocab.undo, lambda: vocab.grow(9)):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        go_on.set()

    assert not in_threads([lambda: vocab.assign([3], 1), other])
    names = [error.split(" was called while another thread")[0] for error in errors]
    assert names == ["assign", "undo", "grow"]
    assert vocab.find([1, 2, 3, 4]).tolist() == [0, 2, 1, 0]


def test_nobody_finds_rows_of_a_batch_that_fails():
    """A score that raises when all keys have been moved."""
    found, start = [], threading.Event()

    def find():
        start.wait(60)
        found.append(vocab.find([1, 2, 3, 4]).tolist())

    def score(last, hits):
        if 4 in vocab._contents.main.keys[1:] and not start.is_set():
            start.set()
            thread.join(1)  # on the lock, or through
            return np.full(len(last), np.nan)
        return last

    vocab, thread = osa.Vocabulary(4, score=score), threading.Thread(target=find)
    vocab.assign([1, 2, 3], 0)
    vocab.assign([5], 1)  # sorts
    vocab.undo()
    thread.start()
    with pytest.raises(ValueError, match="got NaN"):
        vocab.assign([4], 1)
    thread.join(60)
    assert found == [[1, 2, 3, 0]]


# --- hashes ---


def test_strings_beside_bytes():
    keys = ["a", b"\xc3\xa9", "\u00e9", b"a"]
    codes = osa.hash_keys(keys).tolist()
    assert codes == [int(osa.hash_keys(key)) for key in keys]
    assert codes[0] == codes[3]
    assert codes[1] == codes[2]
    vocab = osa.Vocabulary(5)
    assert vocab.assign([["a", b"\xc3\xa9"]], 0).rows.tolist() == [[1, 2]]


def test_long_strings():
    """FNV-1a in Python, for few and many strings of different lengths."""

    def reference(text):
        code = 0xCBF29CE484222325
        for byte in text.encode():
            code = ((code ^ byte) * 0x100000001B3) % 2**64
        return code

    rng = np.random.default_rng(0)
    for number in (1, 15, 16, 17, 60):
        keys = ["ab\u00e9" * int(size) for size in rng.integers(0, 30, number)]
        for given in (keys, np.array(keys)):
            expected = [*map(reference, keys)]
            assert osa.hash_keys(given).tolist() == expected
    start = time.perf_counter()
    osa.hash_keys(["x" * 1_000_000, "y"])
    assert time.perf_counter() - start < 2  # 0.1 s; by arrays of one byte 4.5 s


def test_chosen_keys_find_room():
    """Three keys with both slots in common, for each of sixteen known hashes."""
    shift, keys, rng = np.uint64(50), [], np.random.default_rng(0)
    for attempt in range(16):
        odd = (0x9E3779B97F4A7C15 * (2 * attempt + 1)) % 2**64
        mixed = rng.integers(0, 2**50, 200_000, np.uint64) + np.uint64(5 << 50)
        second = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        slots, counts = np.unique(second >> shift, return_counts=True)
        same = mixed[second >> shift == slots[counts.argmax()]][:3]
        assert len(same) == 3
        folded = same * np.uint64(pow(odd, -1, 2**64))
        keys.append(folded ^ folded >> np.uint64(32))
    keys = np.concatenate(keys)
    vocab = osa.Vocabulary(60)
    rows = vocab.assign(keys, 0).rows
    assert vocab.find(keys).tolist() == rows.tolist() == [*range(1, 49)]
    assert len(vocab._contents.main.index._slots) <= 4 * 256


@pytest.mark.parametrize("padding", [[7, 8], [], np.arange(3), [1]])
def test_there_is_one_padding_key(padding):
    with pytest.raises(ValueError, match=r"padding=\.\.\..*needs one key"):
        osa.Vocabulary(9, padding=padding)


def test_a_score_sees_no_free_row():
    def score(last, hits):
        assert hits.min() > 0
        return last

    vocab = osa.Vocabulary(6, ttl=8, score=score)
    vocab.assign([1, 2, 3, 4, 5], 0)
    vocab.assign([6], 1)  # sorts all rows
    vocab.assign([5], 5)
    fresh = vocab.assign([11, 12, 13, 14], 9)  # three expire, one has to go
    assert fresh.evicted.tolist() == [2, 3, 4, 6]


def test_lists_of_integers_on_both_sides_of_2_to_the_63():
    """Of which NumPy makes floats, where two neighbours are one."""
    keys = [2**63 + 1, 2**63 + 2, 7]
    vocab, expected = osa.Vocabulary(9), osa.Vocabulary(9)
    rows = expected.assign(np.array(keys, np.uint64), 0).rows
    assert vocab.assign(keys, 0).rows.tolist() == rows.tolist()
    assert vocab.find([keys[:2], keys[1:]]).tolist() == [[1, 2], [2, 3]]
    with pytest.raises(TypeError, match="of objects, got one with int"):
        vocab.assign([2**63, -1], 1)
    with pytest.raises(TypeError, match="array of float64"):
        vocab.assign([0.5, 1], 1)


def test_a_score_that_computes_in_place():
    """Two keys of a step shared a row: the score had changed their last step."""

    def score(last, hits):
        last += hits
        return last

    random = np.random.default_rng(0)
    expected = osa.Vocabulary(40, score=lambda last, hits: last + hits)
    vocab = osa.Vocabulary(40, score=score)
    for step in range(60):
        keys = (120 * random.random(24)).astype(np.int64) ** 2 // 120
        wanted, got = (x.assign(keys, step) for x in (expected, vocab))
        assert_identical([*wanted], [*got], f"step {step}")


def test_features_of_one_step_in_one_call():
    """A key that comes later in a step may have lost its row: keys.md says it."""
    vocab = osa.Vocabulary(4)
    vocab.assign([1, 2, 3], 0)
    users, items = np.array([7, 8]), np.array([1, 8])
    apart = osa.Vocabulary(4)
    apart.restore(vocab.arrays)
    assert apart.assign(users, 1).evicted.tolist() == [1, 2]
    assert apart.assign(items, 1).evicted.tolist() == [3]
    found = vocab.assign(np.concatenate([users, items]), 1)
    assert found.evicted.tolist() == [2, 3]
    assert found.rows.tolist() == [2, 3, 1, 3]


@pytest.mark.parametrize("keys", [[5, -(2**40), 5, 7], ["b", "a", "b", "c"]])
def test_an_assignment_has_the_keys_of_fresh_rows(keys):
    """In the order of `fresh`, a copy; no part of the tuple, but of its pickle."""
    vocab = osa.Vocabulary(4)
    first = vocab.assign(keys[2:3], 0)
    second = pickle.loads(pickle.dumps(vocab.assign(keys, 1)))
    codes = osa.hash_keys(keys) if isinstance(keys[0], str) else np.array(keys)
    np.testing.assert_array_equal(first.fresh_keys, codes[2:3])
    np.testing.assert_array_equal(second.fresh_keys, codes[[1, 3]])
    assert vocab.find(second.fresh_keys).tolist() == second.fresh.tolist()
    vocab.assign([9, 10, 11], 2)
    np.testing.assert_array_equal(second.fresh_keys, codes[[1, 3]])
    assert len(second) == 3
    assert second._replace(rows=first.rows).fresh_keys is None
    assert osa.Vocabulary(4).assign([], 0).fresh_keys.shape == (0,)
