"""Share units of work among processes on several machines, through a folder.

Owns: claims and their heartbeat, taking over units of dead processes, waiting for other processes.
Leaves out: what a unit does. A unit commits its result by one rename, with the same bytes in any
process. So a claim only saves work: two processes may do the same unit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from vitscale.distributed.processes import is_alive

HEARTBEAT_S = 5.0
# A claim of another machine expires when its heartbeat is this old by the file system's clock.
# Attribute caches of network file systems stay well below.
DEAD_AFTER_S = 60.0
# Pauses start short, since most waits are, and grow: no pause is longer than a quarter of the wait.
FIRST_WAIT_S, WAIT_GROWTH, LONGEST_WAIT_S = 0.005, 1.25, 1.0


class WorkFolder:
    """The view of one process on the shared folder of a preparation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scratch = path / "scratch" / this_process()
        """Unfinished files of this process; renamed to their place when whole."""
        self._claims = path / "claims"

    def open(self) -> None:
        """Create the subfolders and remove unfinished files of dead processes of this machine.

        Raises FileNotFoundError if the folder itself is gone: another process finished the work.
        """
        self._claims.mkdir(exist_ok=True)
        remove_left_by_dead(self.scratch.parent)
        self.scratch.mkdir(parents=True, exist_ok=True)

    def work_through(
        self,
        units: Sequence[str],
        *,
        is_done: Callable[[str], bool],
        do: Callable[[str], None],
        start: int,
    ) -> None:
        """Return when every unit is done, by this process or another.

        start: the unit to begin with, so that processes do not all try the same claims first.
        Raises FileNotFoundError if the folder is removed meanwhile.
        """
        order = [*units[start % max(1, len(units)) :], *units[: start % max(1, len(units))]]
        waiting = [unit for unit in order if not is_done(unit)]
        pause = FIRST_WAIT_S
        while waiting:
            progressed = False
            for unit in waiting:
                if is_done(unit):
                    continue
                with self.claim(unit) as claimed:
                    if claimed and not is_done(unit):
                        do(unit)
                        progressed = True
            waiting = [unit for unit in waiting if not is_done(unit)]
            if waiting and not progressed:
                if not self.path.exists() and not is_done(waiting[0]):
                    raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.path))
                time.sleep(pause)
                pause = min(WAIT_GROWTH * pause, LONGEST_WAIT_S)

    @contextmanager
    def claim(self, unit: str) -> Iterator[bool]:
        """Whether this process may do a unit; False: another one is doing it."""
        path = self._claims / unit
        if not self._take(path):
            yield False
            return
        ended = threading.Event()
        heart = threading.Thread(target=_beat, args=(path, ended), daemon=True)
        heart.start()
        try:
            yield True
        finally:
            ended.set()
            heart.join()
            path.unlink(missing_ok=True)

    def _take(self, path: Path) -> bool:
        for _ in range(2):
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                if not self._is_dead(path):
                    return False
                path.unlink(missing_ok=True)
                continue
            except FileNotFoundError:
                return False
            with os.fdopen(descriptor, "w") as file:
                json.dump({"machine": machine(), "pid": os.getpid()}, file)
            return True
        return False

    def _is_dead(self, path: Path) -> bool:
        try:
            age = self._file_system_time() - path.stat().st_mtime
            owner = json.loads(path.read_text())
        except FileNotFoundError:
            return False
        except ValueError:
            # Created but not yet written; dead only if it stays so.
            return age > DEAD_AFTER_S
        if owner.get("machine") == machine() and not is_alive(owner["pid"]):
            return True
        return age > DEAD_AFTER_S

    def _file_system_time(self) -> float:
        probe = self.scratch / "clock"
        probe.touch()
        return probe.stat().st_mtime

    def temporary(self, name: str) -> Path:
        """A new name for an unfinished file or folder."""
        return self.scratch / f"{name}.{uuid.uuid4().hex[:8]}"


@cache
def machine() -> str:
    """Name of the machine and its process id namespace: containers may share their host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{socket.gethostname()}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def this_process() -> str:
    """A name unique among the running processes of all machines."""
    return f"{machine()}.{os.getpid()}"


def remove_left_by_dead(folder: Path) -> None:
    """Remove folders named as `this_process()` of ended processes of this machine."""
    for path in folder.glob("*"):
        where, _, pid = path.name.rpartition(".")
        if where == machine() and pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        with suppress(OSError):
            os.utime(path)
