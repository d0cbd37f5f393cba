"""Keep files of this node that only this user can read: a private folder, and arrays in shared
memory that all ranks of the node and their loader workers map.

Leaves out: what is shared. Needs no torch.

One rank of a node writes the arrays as files, the others map them. Pickling such an array writes
its path, so a worker maps it, too. Each process that maps them holds a shared lock of their folder;
the last to exit removes it. What killed jobs left has no lock; the next start removes it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import io
import os
import pickle
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

import numpy as np

from vitscale.config.errors import StorageError, UserError

T = TypeVar("T")
SHARED_MEMORY = "/dev/shm"
# Other users of the shared memory need some.
SPARE_BYTES = 1 << 26
SUFFIX = ".shared"
# A folder without a lock may be one that another job is about to lock.
LEFT_AFTER_S = 60.0
# Descriptors of the folders that this process keeps.
_locks: list[int] = []


def private_folder(parent: str | None = None) -> Path:
    """Create `vitscale-UID` in a folder of this node, with mode 0700.

    parent: None: the one for temporary files.
    Raises UserError if another user owns it or can write to it.
    """
    folder = Path(parent or tempfile.gettempdir()) / f"vitscale-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            "is not a folder that only you can use",
            where=str(folder),
            next_step="remove it, or set TMPDIR to another folder",
        )
    return folder


class Column(np.ndarray[Any, Any]):
    """An array mapped read-only from a file; pickles as the file's path."""

    path: Path | None = None
    """None for a part or a result of a column, which pickles as an array."""

    def __reduce__(self) -> Any:
        return super().__reduce__() if self.path is None else (read_column, (self.path,))


def read_column(path: Path) -> Column:
    """Map the array of a `.npy` file."""
    column = np.load(path, mmap_mode="r").view(Column)
    column.path = path
    return column


def once_per_node(
    make: Callable[[], T], *, is_maker: bool, gather: Callable[[Any], list[Any]]
) -> T:
    """Call `make` on one rank of each node; return its value with arrays that all ranks map.

    is_maker: whether this rank is that one. gather: returns the argument of every rank, in rank
    order. Collective. Raises UserError, on all ranks, when `make` does on one.
    """
    name: str = gather(uuid4().hex + SUFFIX)[0]
    error = None
    if is_maker:
        try:
            _write(make(), name)
        except UserError as caught:
            error = caught
    for found in gather(error):
        if found is not None:
            raise found
    if _find(name) is None:  # a container with memory of its own
        _write(make(), name)
    folder = _find(name)
    assert folder is not None
    _lock(folder)
    atexit.register(_leave, folder)
    with (folder / "value").open("rb") as file:
        value: T = _Reader(file, folder).load()
    return value


class _Writer(pickle.Pickler):
    """Leaves the arrays out of the pickle."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: dict[int, np.ndarray] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, np.ndarray) or not value.size:
            return None
        self.arrays[id(value)] = value
        return id(value)


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, folder: Path) -> None:
        super().__init__(file)
        self.folder = folder

    def persistent_load(self, number: int) -> Column:
        return read_column(self.folder / f"{number}.npy")


def _write(value: object, name: str) -> None:
    """Write a value to a folder of this name, which appears when it is complete."""
    pickled = io.BytesIO()
    writer = _Writer(pickled)
    writer.dump(value)
    size = sum(array.nbytes for array in writer.arrays.values()) + len(pickled.getbuffer())
    parent = _parent_with_room(size)
    _remove_leftovers(parent)
    folder = Path(tempfile.mkdtemp(suffix=SUFFIX, dir=parent))
    _lock(folder)
    try:
        (folder / "value").write_bytes(pickled.getbuffer())
        for number, array in writer.arrays.items():
            np.save(folder / f"{number}.npy", array)
        folder.rename(parent / name)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if error.errno != errno.ENOTEMPTY:  # another rank of this container was faster
            raise StorageError(f"cannot be written ({error.strerror})", where=str(parent)) from None


def _parent_with_room(size: int) -> Path:
    """The shared memory; in containers it may be small."""
    for parent in (SHARED_MEMORY, tempfile.gettempdir()):
        if os.path.isdir(parent) and _free(parent) > size + SPARE_BYTES:
            return private_folder(parent)
    raise StorageError(
        f"neither {SHARED_MEMORY} nor {tempfile.gettempdir()} has room for the {size >> 20} MiB of "
        "the index",
        where="data.path",
        next_step="free memory of the node, or set TMPDIR to a folder with room",
    )


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free


def _find(name: str) -> Path | None:
    parents = (SHARED_MEMORY, tempfile.gettempdir())
    folders = (Path(parent) / f"vitscale-{os.getuid()}" / name for parent in parents)
    return next((folder for folder in folders if folder.is_dir()), None)


def _lock(folder: Path) -> None:
    """Keep a folder until this process exits."""
    _locks.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    fcntl.flock(_locks[-1], fcntl.LOCK_SH)


def _leave(folder: Path) -> None:
    """Remove a folder unless another process keeps it."""
    while _locks:
        os.close(_locks.pop())
    _remove_if_unlocked(folder)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > LEFT_AFTER_S:
                _remove_if_unlocked(folder)


def _remove_if_unlocked(folder: Path) -> None:
    """Remove a folder that no process uses."""
    with suppress(OSError):  # in use, or just removed
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
