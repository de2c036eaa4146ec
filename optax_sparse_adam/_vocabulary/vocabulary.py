"""The public `Vocabulary`: its batches, threads, checkpoints."""

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .checkpoint import GONE, KIND, LOST, OF_WAITING, STEP, checked, new_arrays, resized
from .codes import SIGNED
from .contents import Contents, spread
from .history import History
from .one_writer import OneWriter, by_one_thread
from .options import Options, as_integer, check_number, checked_options
from .order import Score
from .results import Assignment, ChangedRows, FreshRows
from .servers import Servers, changed_codes
from .store import Changes


@jax.tree_util.register_pytree_with_keys_class
class Vocabulary(OneWriter):
    """Gives the rows of a table of fixed size to keys that come and go.

    Keys are what a program has in place of row numbers: 64-bit hashes, ids of users,
    strings. A vocabulary lives on the host, in NumPy, since 64-bit types are off in
    JAX. Each new key gets a free row. If there is none, the key of the lowest score
    makes room; no key of the same step does. All of it is deterministic:

    - Free rows are given in ascending order, to keys as they first come in a batch.
    - Those of the lowest (score, row) are evicted first.
    - With the same arrays and the same batches, the same rows follow, in any process.

    Row 0, `unknown`, has no key. It is the row of keys that `find` does not know, of
    those that were there less than `min_hits` times, and of places without a key. It
    is inside the table, and is trained like any other: an index out of bounds would be
    another row for `table[ids]`, and NaN for `jnp.take`.

    A vocabulary is a pytree of arrays of NumPy, and can be pickled. Several tables may
    share one. In a dictionary of features each may have one of its own.

    Args:
      rows: How many rows the table has, that of unknown keys included.
      min_hits: How often a key must have been there before it gets a row. A key may be
        there several times in one batch.
      score: What a key is worth: `"last"`, the step at which it was last there (least
        recently used goes first); `"hits"`, how often it was there (least frequently
        used goes first); or a function of both, arrays `[n]` of int32, that returns a
        number for each. It must depend on nothing else, and each number on its own
        entries alone: it is called with some of the rows, and its results are kept.
      ttl: Time to live: a key goes that was not there for more than so many steps, an
        eighth of them later at most; not if it is in the batch before which it would.
      padding: A key that means that there is none, such as -1 or `"<pad>"`.
      waiting: For how many keys with less than `min_hits` hits are counted; as many as
        there are rows, if it is not given. Of these the one goes first that was not
        there for the longest time.
      tombstones: How many keys that have gone are remembered for `changed_since`; as
        many as there are rows, if it is not given.

    Raises:
      TypeError: If a size is not an integer.
      ValueError: If one is out of range, or the score unknown.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_sparse_adam as osa
      >>> vocab = osa.Vocabulary(rows=4)
      >>> rows, fresh, evicted = vocab.assign(np.array([2**40, -7, 2**40]), step=0)
      >>> rows.tolist(), fresh.tolist()
      ([1, 2, 1], [1, 2])
      >>> rows, fresh, evicted = vocab.assign(np.array([5, 6]), step=1)
      >>> rows.tolist(), evicted.tolist(), vocab.find([5, -7, 2**40]).tolist()
      ([3, 1], [1099511627776], [3, 2, 0])
      >>> params, tx = {"table": jnp.ones((4, 8))}, osa.sparse_adam(1e-3)
      >>> ids = fresh.padded(64)  # one shape, for a compiled function
      >>> values = {"table": jnp.zeros((64, 8))}
      >>> state = tx.init(params)
      >>> params, state = osa.reset_rows(tx, params, state, {"table": ids}, values)
      >>> params["table"][:, 0].tolist()
      [1.0, 0.0, 1.0, 0.0]
    """

    unknown = 0

    _history: History
    _options: Options
    _servers: Servers
    _contents: Contents
    _given: Any  # arrays of a pickle or a pytree, until they are needed

    def __new__(cls, *args: Any, **kwargs: Any) -> "Vocabulary":
        self: Vocabulary = super().__new__(cls)
        self._servers = Servers()
        return self

    def __init__(
        self,
        rows: int,
        *,
        min_hits: int = 1,
        score: str | Score = "last",
        ttl: int | None = None,
        padding: Any = None,
        waiting: int | None = None,
        tombstones: int | None = None,
    ):
        self._options = checked_options(min_hits, score, ttl, padding)
        check_number("rows, of which one is that of unknown keys,", rows, 2)
        waiting = rows if waiting is None else waiting
        check_number("waiting", waiting, 1)
        tombstones = rows if tombstones is None else tombstones
        check_number("tombstones", tombstones, 0)
        places = 0 if min_hits == 1 else 1 + waiting
        self._load(new_arrays(self._options, rows, places, tombstones))

    @by_one_thread
    def assign(self, keys: Any, step: int, *, mask: Any = None) -> Assignment:
        """Gives a row to each key of a batch; for training.

        Known keys keep their rows. Call it before the step, in the order of the steps,
        and begin the `fresh` rows again, by `reset_rows`, before they are trained. Give
        all keys of a step to one call: a later call of the same step evicts no key that
        an earlier one has seen, but the earlier one may evict what the later one has.

        Args:
          keys: Integers of 64 bits or less, strings or bytes, in any shape. Strings are
            hashed, by `hash_keys`. Signed and unsigned integers of 64 bits have the
            same bits, so a vocabulary has the one or the other, as its first keys;
            strings are unsigned ones.
          step: The time, an integer from 0 to `2**31 - 1`, never less than before.
          mask: bool, in the shape of the keys: False where there is no key. There, and
            where the padding key is, the row is `unknown`, and nothing is counted.

        Returns:
          The `rows` of the keys, those that are `fresh`, and the keys that are
          `evicted`: an `Assignment`.

        Raises:
          TypeError: For keys of other types.
          ValueError: If the step has more different keys than the table has rows; if
            it is less than the last one; for keys that this vocabulary could take for
            others. Nothing has changed then.
          RuntimeError: If another thread is changing the vocabulary.
        """
        held = self._contents
        main, before = held.main, held.numbers[STEP]
        step = as_integer("assign needs a step", step)
        if not before <= step < 2**31:
            raise ValueError(
                "assign needs steps that do not go back, as keys are judged by "
                f"them: from {before}, the last one, to 2**31 - 1; got {step}."
            )
        codes, kind, at, shape = held.read("assign", keys, mask)
        held.count_ids(len(codes), step)
        rows, touched, uses, absent, new = main.index.look_up(codes)
        plan = held.plan(new, touched, step) if len(absent) else None
        changes, fresh, evicted = Changes(), rows[:0], codes[:0]
        moves = plan is not None or self._options.ttl is not None

        def take_back() -> None:
            held.take_back(changes, finished=False)
            self._history.forget(changes)

        with self._move() if moves else contextlib.nullcontext():
            self._take_back = take_back
            try:
                main.touch(changes, touched, uses, step)
                changes.note(held.numbers, slice(None), held.numbers.copy())
                held.numbers[KIND], held.numbers[STEP] = kind, step
                if moves:
                    evicted = held.expire(changes, int(before), step)
                if plan:
                    rows[absent], fresh, gone = held.admit(changes, plan, step)
                    evicted = np.append(evicted, gone) if len(evicted) else gone
                held.bury(changes, evicted, step)
                main.order.add(touched, step)
                main.order.add(fresh, step)
                evicted, keys = map(self._as_keys, (evicted, main.keys[fresh]))
                rows = spread(rows, at, shape)
                of_caller = fresh.copy().view(FreshRows)  # `undo` reads the other one
                of_caller.vocabulary = weakref.ref(self)
                result = Assignment(rows, of_caller, evicted, keys)
                self._history.note(changes)
            except BaseException:  # before `find` may look again
                take_back()
                self._take_back = None
                raise
            self._take_back = None
        return result

    def find(self, keys: Any, *, mask: Any = None) -> np.ndarray:
        """Looks rows up and changes nothing; for serving and evaluation.

        Any number of threads may call it, also while one calls `assign`: each call
        finds the rows that were there before a batch, or those after it.

        Args:
          keys: As for `assign`.
          mask: Likewise.

        Returns:
          int32, in the shape of the keys; `unknown` for those without a row.

        Raises:
          TypeError: As `assign`.
          ValueError: As `assign`, for keys that could be taken for others.
        """
        self._ready()
        return self._read(lambda: self._contents.find(keys, mask))

    def changed_since(self, step: int) -> ChangedRows:
        """Finds keys whose row has changed hands at this step or later.

        A server fetches the rows of `keys`, and drops `gone`. It asks with the step of
        the last batch that it has seen: what is fetched twice does no harm. Of batches
        that `undo` or `restore` has taken back since, it gets what is there now.

        A vocabulary that was restored in another process, or copied, knows nothing of
        batches that were made after its arrays were saved, or taken back before. A
        server that may have seen some begins again, from `arrays`.

        Args:
          step: A step of `assign`.

        Returns:
          `keys`, their `rows`, and the keys that have `gone`: `ChangedRows`.

        Raises:
          TypeError: If the step is no integer.
          ValueError: If more keys have gone, or were taken back, since then than are
            kept; or if the step is after the last one of a vocabulary that was
            restored or copied.
        """
        self._ready()
        with self._lock:
            self._end()
            step = as_integer("changed_since needs a step", step)
            keys, rows, gone = self._servers.changed_since(self._contents, step)
            return ChangedRows(self._as_keys(keys), rows, self._as_keys(gone))

    @by_one_thread
    def undo(self) -> None:
        """Takes the last call of `assign` back, bit for bit; up to eight, one by one.

        For a batch whose step has failed, or is not run: without it, keys would have
        rows that were never begun again.

        Raises:
          RuntimeError: If there is none to take back, since the vocabulary was made,
            restored or grown; or if another thread is changing it.
        """
        held, changes = self._contents, self._history.last()
        main, numbers = held.main, held.numbers.copy()
        rows = np.unique(changes.moved(main))
        before = main.keys[rows], main.hits[rows].copy()

        def take_back(finished: bool) -> None:
            held.take_back(changes, finished)
            codes = changed_codes(before, (main.keys[rows], main.hits[rows]))
            self._servers.note(numbers, held.numbers, codes, 2 * len(main.keys))
            self._history.forget(changes)

        with self._move():
            self._take_back = functools.partial(take_back, finished=False)
            try:
                take_back(finished=True)
            except BaseException:  # a KeyboardInterrupt: what it has begun, it ends
                self._take_back()
                self._take_back = None
                raise
            self._take_back = None

    @by_one_thread
    def grow(self, rows: int) -> None:
        """Makes room for more keys; all keep their rows, and `unknown` is row 0.

        Where `waiting` or `tombstones` are as many as the rows, they grow with them, so
        that it goes on as a new one of so many rows that has restored its `arrays`.
        Grow the table, too: see the page "Rows as things".

        Args:
          rows: How many rows the table has then.

        Raises:
          ValueError: If it has more rows now.
          RuntimeError: If another thread is changing the vocabulary.
        """
        if not self.rows <= as_integer("grow needs rows", rows) < 2**31:
            raise ValueError(
                f"grow needs as many rows as there are, {self.rows}, or more, up "
                f"to 2**31 - 1; got {rows}."
            )
        old, names = self._contents.arrays, ["keys", "last", "hits", "changed"]
        like = old | dict.fromkeys(names, range(rows))
        if len(old.get("waiting_keys", ())) == 1 + self.rows:
            like |= dict.fromkeys(OF_WAITING, range(1 + rows))
        if len(old.get("gone", ())) == self.rows:
            like |= dict.fromkeys(("gone", "gone_at"), range(rows))
        with self._move():
            self._load(resized(old, like), self._history.now)  # it is the same to keys

    @by_one_thread
    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Takes the contents of another vocabulary, of as many rows or fewer.

        If it has as many, what follows is what would have followed there.

        Args:
          arrays: The `arrays` of one with the same options.

        Raises:
          TypeError: For arrays of other types, such as keys that were cut to 32 bits.
          ValueError: If they are of other options, of a larger one, or damaged. Nothing
            has changed then. Of a score that is a function it is known only that it is
            one.
          RuntimeError: If another thread is changing the vocabulary.
        """
        old = self._contents
        new = resized(checked(arrays, self._options), old.arrays)
        names = "keys", "hits", "changed"
        both = (tuple(x[name] for name in names) for x in (old.arrays, new))
        codes = changed_codes(*both)
        # Servers may not have asked for what has gone from the old one, either.
        gone = old.arrays.get("gone", codes[:0])[: old.numbers[GONE]]
        contents = Contents(self._options, new)  # raises before a change
        codes, most = np.append(codes, gone), 2 * self.rows + len(gone)
        with self._move():
            # Servers are told first: too much, if a KeyboardInterrupt comes now.
            lost = int(old.numbers[LOST])
            self._servers.note(old.numbers, new["numbers"], codes, most, lost)
            self._servers.is_copy = True
            self._hold(contents)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """A copy of all that is needed to go on, for `np.savez`, Orbax or a server.

        `keys`, `last` and `hits` are of the rows: the key of row `i` is `keys[i]`, as
        uint64 (`keys.view(np.int64)` for signed ones), if `hits[i]` is not 0.
        """
        self._ready()
        with self._lock:
            self._end()
            return {name: x.copy() for name, x in self._contents.arrays.items()}

    def arrays_before(self, step: int) -> dict[str, np.ndarray]:
        """The `arrays` as they were between two steps: `step - 1` is the last one.

        For a checkpoint of a run whose loader assigns ahead. Nothing changes: what the
        last eight calls of `assign` have done is taken back in a copy.

        Args:
          step: How many steps have been trained, of which those of `assign` are 0, 1,
            2, ...; in a step without keys call `assign([], step)`.

        Returns:
          The arrays, for `restore`.

        Raises:
          TypeError: If the step is no integer.
          ValueError: If no call had the step before, so that steps are counted
            otherwise here and there; if there are more calls after it; or if it was
            restored or grown after that step. If the first call of all is of this
            step: were its keys known before the training, or drawn ahead?
        """
        self._ready()
        with self._lock:
            self._end()
            step = as_integer("arrays_before needs a step", step)
            return self._history.arrays_before(self._contents, step)

    @property
    def rows(self) -> int:
        """How many rows the table has, that of unknown keys included."""
        self._ready()
        return len(self._contents.main.keys)

    def __len__(self) -> int:
        """How many keys have a row."""
        return self.rows - self._contents.main.room - 1

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self._options._asdict().items())
        sizes = "?" if self._given else f"{self.rows} with {len(self)} keys"
        return f"<Vocabulary of rows: {sizes}, {options}>"

    def __getstate__(self) -> Any:
        return self._options, self._given or self.arrays

    def __setstate__(self, state: Any) -> None:
        self._options, self._given = state
        self._servers.is_copy = True

    def tree_flatten_with_keys(self) -> Any:
        options, arrays = self.__getstate__()
        keyed = [(jax.tree_util.DictKey(name), x) for name, x in arrays.items()]
        return keyed, (options, tuple(arrays))

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "Vocabulary":
        self = cls.__new__(cls)
        self.__setstate__((static[0], dict(zip(static[1], leaves, strict=True))))
        return self

    def _load(self, arrays: dict[str, np.ndarray], now: object = None) -> None:
        self._hold(Contents(self._options, arrays), now)  # raises before a change

    def _hold(self, contents: Contents, now: object = None) -> None:
        self._history = History(now)  # first: it is of other arrays
        self._contents = contents
        self._given = None

    def _ready(self) -> None:
        """Takes up what a pickle or a pytree has given, when it is first needed.

        And takes back what was left half done, if nobody has begun to change it.
        """
        if not self._changing.locked():
            self._end()
        if self._given is not None:
            with self._lock:
                if self._given is not None:
                    self._load(checked(self._given, self._options))

    # What a `HostTrainer` asks.

    @property
    def history(self) -> History:
        """Of the calls since it was made or restored."""
        self._ready()
        return self._history

    @property
    def last_step(self) -> int:
        """That of the last call; 0 if there was none."""
        return int(self._contents.numbers[STEP])

    def arrays_at(self, now: object) -> dict[str, np.ndarray] | None:
        """The `arrays` when `history.now` was this; `None` if that is not known."""
        self._ready()
        with self._lock:
            self._end()
            since = self._history.since(now)
            if since is None:
                return None
            return self._contents.arrays_before(0, since)[0]

    def _as_keys(self, codes: np.ndarray) -> np.ndarray:
        kind = int(self._contents.numbers[KIND]) or self._servers.kind
        return codes.view(np.int64 if kind == SIGNED else np.uint64)
