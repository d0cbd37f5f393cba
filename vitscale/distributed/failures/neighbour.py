"""Watch the process of the next rank of this node.

A killed process closes its connections, but no rank that waits for nothing of it would see that.
Leaves out: what follows from it (`heartbeat`).
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from vitscale.distributed.world import World

KEY = "vitscale/process"


class Neighbour:
    """The next rank of this node, the last one's being the first: a ring of pids."""

    def __init__(self, world: World) -> None:
        self._store, self._own = world.store, world.rank
        is_last = world.local_rank == world.local_world_size - 1
        self.rank = world.rank - world.local_rank if is_last else world.rank + 1
        self.needs_address = world.store is not None and self.rank != world.rank
        self._watched: int | None = None
        self._was_gone = False

    def announce(self) -> None:
        """Say where this rank's process is."""
        assert self._store is not None
        self._store.set(f"{KEY}/{self._own}", _address(os.getpid()))

    def read_address(self) -> None:
        """Begin to watch the neighbour, if it has announced itself and can be seen from here.

        It may have ended since.
        """
        assert self._store is not None
        key = f"{KEY}/{self.rank}"
        if not self._store.check([key]):
            return
        self.needs_address = False
        address = self._store.get(key).decode()
        pid = int(address.rpartition(" ")[2])
        try:
            watched = os.pidfd_open(pid)
        except OSError as error:
            # Of another process namespace or node it may be there all the same.
            is_near = _place(address) == _place(_address(os.getpid()))
            self._was_gone = isinstance(error, ProcessLookupError) and is_near
        else:
            # Of another process namespace it would be another process.
            if _address(pid) == address:
                self._watched = watched
            else:
                os.close(watched)

    def is_gone(self) -> bool:
        """Whether its process has ended. False as long as it cannot be seen."""
        if self._watched is None:
            return self._was_gone
        return bool(select.select([self._watched], [], [], 0)[0])

    def forget(self) -> None:
        """Watch it no longer."""
        if self._watched is not None:
            os.close(self._watched)
        self._watched, self._was_gone = None, False


def node_identity() -> str:
    """The same for processes that see the same shared memory, and for no others.

    Host names are not unique, and containers on one machine may each have their own.
    """
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for folder in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            facts.append(str(os.stat(folder).st_dev))
    return " ".join(facts)


def _place(address: str) -> str:
    """Node and process namespace."""
    return address.rsplit(" ", 2)[0]


def _address(pid: int) -> str:
    """The same for one process, seen from where it is the same process."""
    start = ""
    with suppress(OSError, IndexError):
        # Field 22, the start time: the system uses ids again.
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{node_identity()} {namespace} {start} {pid}"
