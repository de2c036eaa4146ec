"""Rows that come from a disk are asked for before they are read, and others are not."""

import mmap
import os
import threading

import numpy as np
import pytest

from optax_sparse_adam.host_tables import _file
from optax_sparse_adam.host_tables._records import Layout
from optax_sparse_adam.host_tables._store import Memory

ROWS, IDS, PAGE = 1000, 100, 4096


class Disk:
    """A page cache of pages that were asked for, and counts of those waited for."""

    def __init__(self, monkeypatch):
        self.cached, self.waited, self.asked = set(), 0, 0
        read = Memory.take_fields

        def take_fields(memory, rows, out):
            self.waited += len(set(rows.tolist()) - self.cached)
            self.cached |= set(rows.tolist())
            read(memory, rows, out)

        def fadvise(fd, start, length, advice):
            self.asked += 1
            first = start // PAGE - 1  # behind the header, a page
            self.cached |= set(range(first, first + length // PAGE))

        monkeypatch.setattr(Memory, "take_fields", take_fields)
        monkeypatch.setattr(os, "posix_fadvise", fadvise)
        monkeypatch.setattr(_file, "_disk_reads", lambda: self.waited)

    def batches(self, file, count, keep):
        """For each of some batches, whether rows were waited for or asked for."""
        found = []
        for number in range(count):
            rows = np.sort(np.random.default_rng(number).permutation(ROWS)[:IDS])
            out = np.empty((IDS, PAGE // 4), np.uint32)
            before = self.waited, self.asked
            if not keep:
                self.cached.clear()
            file.take_fields(rows.astype(np.int32), [out])
            np.testing.assert_array_equal(out[:, 0], rows)
            found.append((self.waited > before[0], self.asked > before[1]))
        waited, asked = np.array(found).T
        return waited, asked


@pytest.fixture
def file(tmp_path):
    layout = Layout([("row", (PAGE // 4,), np.uint32)])
    file = _file.File(tmp_path / "table.bin", "table", ROWS, layout, None)
    rows = np.broadcast_to(np.arange(ROWS, dtype=np.uint32)[:, None], (ROWS, PAGE // 4))
    file.begin([(0, rows)])
    assert file._start == PAGE
    yield file
    file.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="as macOS")
def test_a_cold_file_stays_so_for_some_batches(file, monkeypatch):
    """Nobody waits for what was asked for, which says nothing of the next batch."""
    disk = Disk(monkeypatch)
    waited, asked = disk.batches(file, 52, keep=False)
    assert waited[0]  # nothing was known
    np.testing.assert_array_equal(asked, ~waited)
    # One batch in seventeen is not asked for, and shows how it is now.
    np.testing.assert_array_equal(np.flatnonzero(waited), [0, 17, 34, 51])
    # All pages come into memory, and stay.
    disk.cached = set(range(ROWS))
    waited, asked = disk.batches(file, 30, keep=True)
    assert not waited.any()
    np.testing.assert_array_equal(np.flatnonzero(asked), range(16))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="as macOS")
def test_a_file_in_memory_is_asked_for_nothing(file, monkeypatch):
    disk = Disk(monkeypatch)
    disk.cached = set(range(ROWS))
    disk.cached -= {7}  # a single page is no cold file
    waited, asked = disk.batches(file, 20, keep=True)
    assert waited.sum() == 1
    assert not asked.any()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="as macOS")
def test_other_threads_that_wait_count(tmp_path):
    """Rows are read by as many as there are cores, of which the caller is one."""
    path = tmp_path / "pages"
    with path.open("w+b") as file:
        file.write(bytes(64 * PAGE))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = mmap.mmap(file.fileno(), 0)
    mapping.madvise(mmap.MADV_RANDOM)
    before = _file._disk_reads()
    thread = threading.Thread(target=lambda: [mapping[k * PAGE] for k in range(64)])
    thread.start()
    thread.join()
    waited = _file._disk_reads() - before
    mapping.close()
    if waited == 0 and _is_in_memory(tmp_path):
        pytest.skip("the folder is in memory, as on tmpfs")
    assert waited > _file._FEW


def _is_in_memory(folder):
    with open("/proc/mounts") as file:
        mounts = [line.split()[1:3] for line in file]
    found = [x for x in mounts if str(folder).startswith(x[0])]
    return max(found, key=lambda x: len(x[0]))[1] in ("tmpfs", "ramfs", "overlay")
