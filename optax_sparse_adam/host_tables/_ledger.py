"""Which checkpoint it is: the one place that knows, and the order of what is written.

    store: mark (n1, pending n2) -> store: flush -> archive n2 -> store: mark (n2)

A checkpoint `n2` is there when the archive has its name. Before that every store says
that it may be, and no row changes until it is known: `resolve` looks at the archive,
and whatever ended `next`, the next call that writes resolves it first. So a process
that is killed leaves one of two states: the archive is `n1`, to which the journal of
`n1` brings the rows; or it is `n2`, and the rows are those of `n2`.

Of several processes one writes the archive, when all others have done what comes before
it. An interrupt of another one does not say whether it is there, so that is resolved
later.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ._archive import name_in, part_name
from ._journal import Journal, Undo
from ._records import Layout
from ._store import Ascending, Mark, Store


class Ledger:
    """The checkpoint to which rows go back, and its journal.

    Args:
      stores: Of each table.
      layouts: Their records.
      sizes: How many rows each has.
      fsync: Whether journals wait for the disk.
      processes: The number of this process, and of all: each has a journal.

    Attributes:
      mark: What stores say of themselves.
      names: All checkpoints of this run, in any folder.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        layouts: Sequence[Layout],
        sizes: Sequence[int],
        fsync: bool,
        processes: tuple[int, int] = (0, 1),
    ):
        self.mark, self.names = Mark(), set[str]()
        self._stores, self._processes = stores, processes
        self._options = layouts, sizes, fsync
        self._journal: Journal | None = None
        self._pending: tuple[Journal, Mark] | None = None

    def remember(self, changes: Sequence[tuple[int, Ascending]]) -> None:
        """Comes before rows of tables are changed: keeps what they were."""
        self.resolve()
        if self._journal is None:
            return
        for k, rows in changes:
            if self._stores[k].archived() is None and len(rows):
                self._journal.append(k, rows, self._stores[k])
        self._journal.commit()
        self.mark = self.mark._replace(journal=self._journal.end)
        self._set_marks(self.mark)

    @contextlib.contextmanager
    def next(self, folder: Path, name: str, step: int) -> Iterator[None]:
        """Of a new checkpoint of this name the archive is written inside of `with`."""
        self.resolve()
        file_name = part_name("journal", name, *self._processes)
        journal = Journal(folder / file_name, *self._options)
        self._pending = journal, Mark(step, name, journal.end)
        try:
            self._set_marks(self.mark._replace(pending=name))
            yield
        except Exception:
            self.resolve()
            raise
        self.resolve()

    def resolve(self) -> None:
        """Finds out which checkpoint is there, where it is not known."""
        if self._pending is None:
            return
        journal, mark = self._pending
        if name_in(journal.path.parent) == mark.checkpoint:
            self.names.add(mark.checkpoint)
            self._set_marks(mark)
            # What changes from now on is no more in the journal before.
            if self._journal is not None:
                self._journal.remove()
            self._journal, self.mark, self._pending = journal, mark, None
        else:
            self._set_marks(self.mark)
            journal.remove()
            self._pending = None

    def go_on_from(self, name: str, step: int, undo: Undo) -> None:
        """Begins at a checkpoint that was found, to which rows are brought back now."""
        self.names = {name}
        self.mark = Mark(step, name, undo.end)
        # Before any row is changed: a mark may still say that one is of another.
        self._set_marks(self.mark)

    def close(self) -> None:
        for journal in (self._journal, *(self._pending or ())[:1]):
            if journal is not None:
                journal.close()

    def _set_marks(self, mark: Mark) -> None:
        for store in self._stores:
            if store.archived() is None and {*store.marks} != {mark}:
                store.set_mark(mark)
