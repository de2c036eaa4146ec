"""The archive of a checkpoint: one file, which is replaced at once or not at all."""

import contextlib
import errno
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ._lock import lock
from ._records import naming, sync_folder

ARCHIVE, _NEW = "checkpoint.npz", ".new"
# What zipfile, NumPy and json raise of files of other bytes: each was seen.
_STUMBLES = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, ValueError),
    *(TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError),
)


def part_name(kind: str, name: str, process: int, processes: int) -> str:
    """The name of what one of several processes adds to a checkpoint."""
    return f"{kind}-{name}" + (f"-{process}" if processes > 1 else "")


def name_in(folder: Path) -> str | None:
    """Of the checkpoint that a folder has, if there is one."""
    if not (folder / ARCHIVE).exists():
        return None
    name: str = read_archive(folder / ARCHIVE, whole=False)[0]["name"]
    return name


def read_archive(
    path: Path, *, whole: bool = True
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What an archive says of itself, and its arrays.

    Raises:
      ValueError: If it is none, or damaged.
    """
    try:
        with path.open("rb") as whole_file, np.load(whole_file) as file:
            about = json.loads(file["about"].tobytes())
            if (type(about["name"]), type(about["step"])) != (str, int):
                raise ValueError("it has no name")
            more = sum(map(len, about.get("stateful", {}).values()))
            count = len(about["arrays"]) + more if whole else 0
            return about, [file[f"array{k}"] for k in range(count)]
    except (*_STUMBLES, OSError) as error:
        # What a signal's handler has raised is of another class.
        is_other = isinstance(error, OSError) and type(error) is not OSError
        if is_other or getattr(error, "errno", None) not in {None, errno.EINVAL}:
            raise
        is_large = isinstance(error, MemoryError)
        what = "is too large for memory" if is_large else "is no checkpoint"
        raise ValueError(
            f"{path} {what} of a HostTrainer, or was damaged: {error!r}. "
            "Delete the folder, if it is of no use, or take another one."
        ) from error


@contextlib.contextmanager
def alone_in(folder: Path, function: str, name: str = ARCHIVE) -> Iterator[None]:
    """Nobody else makes what this archive is to be of, from here to its end.

    The lock is of the new file, before it is written: one that has got its name
    meanwhile is another file, or none.

    Args:
      folder: Of the archive.
      function: What the user called, for errors.
      name: Of the archive.

    Raises:
      BlockingIOError: If another trainer does.
    """
    new = folder / (name + _NEW)
    words = f"{function} writes this, and another HostTrainer has it"

    def is_new(file: FileIO) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), new.stat())
        return False

    def remove(file: FileIO) -> None:
        if is_new(file):  # half of it keeps a full disk full
            new.unlink()

    with contextlib.ExitStack() as end:
        while True:
            file = end.enter_context(FileIO(new, "ab"))
            try:
                lock(file, new, words)
            except BlockingIOError:
                raise
            except OSError:  # a file system that has no locks
                break
            if is_new(file):
                break
            file.close()
        end.callback(remove, file)
        yield


def write_archive(
    folder: Path,
    arrays: Sequence[np.ndarray],
    about: Mapping[str, Any],
    name: str = ARCHIVE,
) -> None:
    """Replaces the archive of a folder, at once."""
    new = folder / (name + _NEW)
    try:
        with naming(new), new.open("wb") as file:
            text = np.frombuffer(json.dumps(about).encode(), np.uint8)
            # Types that NumPy does not know, such as bfloat16, are bytes in a file.
            held = (np.ascontiguousarray(x).reshape(-1) for x in arrays)
            named: Any = {f"array{k}": x.view(np.uint8) for k, x in enumerate(held)}
            np.savez(file, about=text, **named)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / name)
    except BaseException as error:
        new.unlink(missing_ok=True)  # half of it keeps a full disk full
        if isinstance(error, ValueError) and error.__context__ is not None:
            raise error.__context__ from None  # an interrupt, which zipfile replaces
        raise
    sync_folder(folder)
