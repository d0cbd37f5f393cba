"""Make a value once per node; the other ranks of the node, and loader workers, map its arrays.

Owns: the file in shared memory, its lock, removal of what killed jobs left, and handing a value to
another process as open files.
Leaves out: what is shared. Needs no torch, but for the exchange that the caller passes.

The first rank of a node writes the value to a file of its own user, with the arrays apart from the
rest (pickle protocol 5), and the others map it read-only. As soon as all have, the name is removed:
the memory lives as long as a process maps it, so nothing is left at exit. The descriptor stays
open, so that `share` can pass the arrays on. A job that is killed before the name is removed leaves
a file without a lock; the next start removes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import socket
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vitscale.config.errors import UserError

T = TypeVar("T")
# Takes this rank's value, returns those of all ranks in rank order.
Gather = Callable[[Any], list[Any]]
SHARED_MEMORY = "/dev/shm"
SUFFIX = ".shared"
ALIGNMENT = 64
# Other users of the shared memory, such as loader workers, need some.
SPARE_BYTES = 1 << 28


# Mapped files of this process, as long as an array shows them: descriptor and address.
_MAPPED: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()


class _Report(NamedTuple):
    """What a rank tells the others."""

    error: str | None = None
    path: str | None = None
    reason: str | None = None
    """Why nothing is shared."""


def once_per_node(
    make: Callable[[], T], *, rank: int, gather: Gather, for_workers: bool = False
) -> tuple[T, list[str]]:
    """`make()` of the first rank of each node, with the same arrays for all ranks of the node.

    for_workers: also share where a rank is alone on its node, for its workers to map.
    The arrays are read-only. Returns the value and sentences on why a node shares nothing, in
    which case each rank makes its own. Collective.
    Raises UserError, on all ranks, when `make` does on one.
    """
    nodes = gather(node_identity())
    same = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    with ExitStack() as stack:
        found, report, error = [], _Report(), None
        if rank == same[0]:
            remove_leftovers(Path(SHARED_MEMORY))  # also where nothing is shared
            try:
                found = [make()]
                if len(same) > 1 or for_workers:
                    file = SharedFile.write(found[0])
                    stack.callback(file.remove)  # when all have mapped it
                    report = _Report(path=str(file.path))
            except UserError as caught:
                error, report = caught, _Report(error=caught.text())
            except OSError as caught:
                report = _Report(reason=str(caught))
        first: list[_Report] = gather(report)
        _raise_first(first, own=error)
        path, report = first[same[0]].path, _Report()
        try:
            if path is not None:
                found = [read_shared(Path(path))]
        except OSError as caught:
            report = _Report(reason=str(caught))
        try:
            found = found or [make()]
        except UserError as caught:
            error, report = caught, _Report(error=caught.text())
        second: list[_Report] = gather(report)
    _raise_first(second, own=error)
    reasons = {each.reason for each in (*first, *second) if each.reason is not None}
    return found[0], [f"every rank reads it alone: {each}" for each in sorted(reasons)]


def _raise_first(reports: Sequence[_Report], *, own: UserError | None) -> None:
    """Raise the error of the first rank that has one; its own where that is possible."""
    for number, report in enumerate(reports):
        if report.error is not None:
            if own is not None and own.text() == report.error:
                raise own
            raise UserError(f"rank {number}: {report.error}")


def node_identity() -> str:
    """The same for processes that see the same shared memory, and for no others.

    Host names are not unique, and containers on one machine may each have their own.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        with suppress(OSError):
            facts.append(str(os.stat(folder).st_dev))
    return " ".join(facts)


class SharedFile:
    """A file that this process has written and locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def write(cls, value: object) -> SharedFile:
        """Raises OSError if no folder has room."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        pieces = [memoryview(data), *(each.raw() for each in buffers)]
        starts = _starts([len(piece) for piece in pieces])
        reason = "no folder for shared files"
        for folder in dict.fromkeys((SHARED_MEMORY, tempfile.gettempdir())):
            if not os.path.isdir(folder):
                continue
            remove_leftovers(Path(folder))
            if _free(folder) < starts[-1] + SPARE_BYTES:
                reason = f"{folder} has no room for {starts[-1] >> 20} MiB"
                continue
            file = cls._create(folder)
            try:
                sizes = array("q", [len(pieces), *map(len, pieces)])
                _write_at(file._descriptor, 0, memoryview(sizes.tobytes()))
                for piece, start in zip(pieces, starts, strict=False):
                    _write_at(file._descriptor, start, piece)
                return file
            except OSError as error:
                file.remove()
                reason = f"{folder} cannot be written ({error.strerror})"
        raise OSError(reason)

    @classmethod
    def _create(cls, folder: str) -> SharedFile:
        while True:
            descriptor, path = tempfile.mkstemp(prefix=_prefix(), suffix=SUFFIX, dir=folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another start may have removed it before it was locked.
            if os.fstat(descriptor).st_nlink:
                return cls(Path(path), descriptor)
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the name; those who have mapped the file keep its content."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def read_shared(path: Path) -> Any:
    """The value of a file, its arrays mapped read-only. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # Unpickling runs code, so the file must be one's own.
        if os.fstat(descriptor).st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        mapped = _map(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    num = mapped[:8].cast("q")[0]
    sizes = mapped[8 : 8 * (num + 1)].cast("q").tolist()
    starts = _starts(sizes)
    data, *buffers = (
        mapped[start : start + size] for start, size in zip(starts, sizes, strict=False)
    )
    return pickle.loads(data, buffers=buffers)


class FilePart(NamedTuple):
    """Consecutive bytes of an open file, which other processes map."""

    file: int
    """Index of the file among the descriptors that are sent."""
    start: int
    num_bytes: int


class Shared(NamedTuple):
    """A value as open files: the first has its pickle, and arrays that no file has."""

    pieces: tuple[FilePart, ...]
    descriptors: tuple[int, ...]


@contextmanager
def share(value: object) -> Iterator[Shared]:
    """A value for other processes, which map its arrays; valid within the block.

    Arrays that `read_shared` has mapped are not copied, others once for all processes.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    descriptors, pieces, end = [os.memfd_create("shared", os.MFD_CLOEXEC)], [], 0
    try:
        for piece in (memoryview(data), *(each.raw() for each in buffers)):
            descriptor, start = _place_of(piece) or (descriptors[0], end + -end % ALIGNMENT)
            if descriptor == descriptors[0]:
                _write_at(descriptor, start, piece)
                end = start + len(piece)
            if descriptor not in descriptors:
                descriptors.append(descriptor)
            pieces.append(FilePart(descriptors.index(descriptor), start, len(piece)))
        yield Shared(tuple(pieces), tuple(descriptors))
    finally:
        os.close(descriptors[0])


def receive(pieces: Sequence[FilePart], descriptors: Sequence[int]) -> Any:
    """The value that another process shares, its arrays read-only. Closes what is not mapped."""
    files = [_map(descriptor) for descriptor in descriptors]
    data, *buffers = (files[file][start : start + size] for file, start, size in pieces)
    return pickle.loads(data, buffers=buffers)


def _map(descriptor: int) -> memoryview:
    """The bytes of a file; closes the descriptor when nothing shows them any more."""
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    _MAPPED[mapped] = descriptor, _address(memoryview(mapped))
    weakref.finalize(mapped, os.close, descriptor).atexit = False
    return memoryview(mapped)


def _place_of(piece: memoryview) -> tuple[int, int] | None:
    """Descriptor and first byte in the mapped file that has these bytes, if any has."""
    address = _address(piece)
    for mapped, (descriptor, start) in list(_MAPPED.items()):
        if start <= address and address + len(piece) <= start + len(mapped):
            return descriptor, address - start
    return None


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0]) if piece else 0


def _write_at(descriptor: int, start: int, piece: memoryview) -> None:
    os.lseek(descriptor, start, os.SEEK_SET)
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def remove_leftovers(folder: Path) -> None:
    """Remove the files of killed jobs: those that no process has locked."""
    for path in folder.glob(f"{_prefix()}*{SUFFIX}"):
        with suppress(OSError):  # just removed by its owner, or in use
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _prefix() -> str:
    return f"vitscale-{os.getuid()}-"


def _starts(sizes: Sequence[int]) -> list[int]:
    """The aligned first byte of each piece after the table of sizes; last: the end of the file."""
    starts, end = [], 8 * (len(sizes) + 1)
    for size in sizes:
        end += -end % ALIGNMENT
        starts.append(end)
        end += size
    return [*starts, end]


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
