"""Share arrays among the processes of this node.

One rank of a node writes the arrays to memory without a name, which all ranks open through
`/proc/PID/fd/NUMBER`. Pickling such an array writes the path in this rank, so its workers map it,
too. The kernel frees the memory when the last array in it is collected, or the last of these
processes ends, however it does.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import numpy as np

from vitscale.config.errors import UserError, raise_alike
from vitscale.distributed.processes import node_name

T = TypeVar("T")


class Column(np.ndarray[Any, Any]):
    """An array mapped read-only from a file; pickles as the file's path."""

    path: str | None = None
    """None for a part or a result of a column, which pickles as an array."""

    def __reduce__(self) -> Any:
        if self.path is None:
            return super().__reduce__()
        return read_column, (self.path,)


def read_column(path: str) -> Column:
    """Map the array of a `.npy` file.

    This process keeps it open as long as it has the array, for those that it gives the path: its
    maker may be gone by then.
    """
    descriptor = os.open(path, os.O_RDONLY)
    column = np.load(_own_path(descriptor), mmap_mode="r").view(Column)
    column.path = _own_path(descriptor)

    # Processes that outlive this one may have the path when this one ends.
    weakref.finalize(column, os.close, descriptor).atexit = False
    return column


class _SharingPickler(pickle.Pickler):
    """A pickler that writes arrays to memory of its own, and their paths to the pickle."""

    memories: ExitStack

    def reducer_override(self, value: Any) -> Any:
        # Other objects are pickled as usual; an empty array cannot be mapped.
        if type(value) is not np.ndarray or not value.size:
            return NotImplemented
        return read_column, (_shared(value, self.memories),)


def _shared(array: np.ndarray, memories: ExitStack) -> str:
    """Copy an array to memory that lasts until `memories` end, whatever /dev/shm holds."""
    memory = os.memfd_create("column", os.MFD_CLOEXEC)
    memories.callback(os.close, memory)
    with open(memory, "wb", closefd=False) as file:
        np.save(file, array)
    return _own_path(memory)


def _own_path(descriptor: int) -> str:
    """The path under which processes of this node open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of the file that this process finds at a path; None if there is none."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def once_per_node(
    make: Callable[[], T], *, is_maker: bool, gather: Callable[[Any], list[Any]]
) -> T:
    """Call `make` on one rank of each node; return its value with arrays that all ranks map.

    is_maker: whether this rank is that one. gather: returns the argument of every rank, in rank
    order. Collective. Raises, on all ranks, the UserError of all makers, or a NodeError that names
    the first maker that has one.
    """
    with ExitStack() as memories:
        own: tuple[str, Any] | None = None
        error: UserError | None = None
        if is_maker:
            try:
                pickled = io.BytesIO()
                pickler = _SharingPickler(pickled, protocol=5)
                pickler.memories = memories
                pickler.dump(make())
                path = _shared(np.frombuffer(pickled.getbuffer(), np.uint8), memories)
                own = path, _identity(path)
            except UserError as caught:
                error = caught

        reports = gather((node_name(), is_maker, error, own))
        nodes, makers, errors, _ = zip(*reports, strict=True)
        raise_alike(errors, nodes=nodes, num_tried=sum(makers))

        # The first maker of this node is the one whose arrays all of its ranks map.
        here = [made for node, _, _, made in reports if made and node == node_name()]
        path, identity = here[0]
        is_shared = _identity(path) == identity
        if is_shared:
            value: T = pickle.loads(read_column(path).data)

        # All ranks have mapped the memory when its maker lets go of it.
        gather(None)

    # In a container with processes of its own, the path is another file or none.
    if not is_shared:
        return make()
    return value
