"""Keep files of this node that only this user can read: a private folder, and arrays in shared
memory that all ranks of the node and their loader workers map.

Leaves out: what is shared. Needs no torch.

One rank of a node writes the arrays as files, and all ranks map them. Pickling such an array writes
its path, so a worker maps it, too. The rank that wrote them locks their folder, and removes it when
it exits. What a killed job left has no lock; the next start removes it.
"""

from __future__ import annotations

import atexit
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

import numpy as np

from vitscale.config.errors import StorageError, UserError
from vitscale.distributed.processes import node_name

T = TypeVar("T")
SHARED_MEMORY = "/dev/shm"
# Other users of the shared memory need some.
SPARE_BYTES = 1 << 26
SUFFIX = ".shared"
# A folder without a lock may be one that another job is about to lock.
LEFT_AFTER_S = 60.0


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
    folder, error = None, None
    if is_maker:
        try:
            folder = _write(make())
        except UserError as caught:
            error = caught
    folders: dict[str, Path] = {}
    for node, path, found in gather((node_name(), folder, error)):
        if found is not None:
            raise found
        if path is not None:
            folders[node] = path
    folder = folders[node_name()]
    if not folder.is_dir():  # a container with memory of its own
        return make()
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


def _write(value: object) -> Path:
    """Write a value to a new folder, which is locked until this process exits."""
    pickled = io.BytesIO()
    writer = _Writer(pickled)
    writer.dump(value)
    size = sum(array.nbytes for array in writer.arrays.values()) + len(pickled.getbuffer())
    parent = _parent_with_room(size)
    for left in parent.glob(f"*{SUFFIX}"):
        _remove_leftover(left)
    folder = Path(tempfile.mkdtemp(suffix=SUFFIX, dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        (folder / "value").write_bytes(pickled.getbuffer())
        for number, array in writer.arrays.items():
            np.save(folder / f"{number}.npy", array)
    except OSError as error:
        raise StorageError(f"cannot be written ({error.strerror})", where=str(parent)) from None
    return folder


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


def _remove_leftover(folder: Path) -> None:
    """Remove a folder that no process has locked."""
    with suppress(OSError):  # locked, or just removed
        if time.time() - folder.stat().st_mtime < LEFT_AFTER_S:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
