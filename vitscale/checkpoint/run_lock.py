"""Let one job at a time write to a run folder.

`RUN/.lock` is locked by flock, names job and node of its holder, and is touched every BEAT_S. flock
alone is not enough: some file systems have none, or one for each node, and NFS may keep that of a
node that died.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vitscale.config.errors import FailureKind, UserError
from vitscale.distributed.processes import node_name
from vitscale.distributed.world import World, errors_on_all_ranks

# After SILENT_S without a touch a holder on another node is gone. Under SLURM a start waits for
# WAIT_S: the holder may be an attempt that is ending. The other ranks wait too, so not for longer.
BEAT_S, SILENT_S, WAIT_S = 5.0, 20.0, 30.0


class FolderTakenError(UserError):
    """Another job may be writing to the run folder; a later start may succeed."""

    kind = FailureKind.OTHER


@contextmanager
def run_folder_lock(folder: Path, *, world: World) -> Iterator[None]:
    """Hold the run folder inside the block. Raises UserError, on all ranks, for a second job."""
    with ExitStack() as stack:
        with errors_on_all_ranks("cannot be used as run folder", folder):
            if world.is_first:
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                stack.enter_context(_held(folder / ".lock"))
        yield


@contextmanager
def _held(path: Path) -> Iterator[None]:
    ending = threading.Event()

    def touch() -> None:
        while not ending.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    with open(path, "a+") as file:
        # Or loader workers, which outlive a killed rank by seconds, would hold the lock.
        os.register_at_fork(after_in_child=file.close)
        _acquire(path, file.fileno())
        job = os.environ.get("SLURM_JOB_ID")
        file.truncate(0)
        file.write(f"{f'job {job}' if job else f'process {os.getpid()}'} on {node_name()}")
        file.flush()
        os.fsync(file.fileno())
        threading.Thread(target=touch, name="run-folder-lock", daemon=True).start()
        try:
            yield
        finally:
            ending.set()
            with suppress(OSError):
                file.truncate(0)


def _acquire(path: Path, descriptor: int) -> None:
    """Return when nobody else holds the lock. Raises UserError when somebody does."""
    start = touched = time.monotonic()
    first = last = path.stat().st_mtime_ns
    while True:
        locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:  # not on this file system
            locked = None
        now, holder = time.monotonic(), path.read_text()
        if (beat := path.stat().st_mtime_ns) != last:
            last, touched = beat, now
        is_gone = not holder or now - touched > SILENT_S
        # On one node flock is right, even just after a kill.
        if (locked and holder.endswith(f" on {node_name()}")) or (locked is not False and is_gone):
            return
        what = "another job is training in this run folder" + (f": {holder}" if holder else "")
        next_step = "wait for it or stop it, or choose another name"
        if "SLURM_JOB_ID" not in os.environ and (locked is False or last != first):
            raise UserError(what, where=str(path.parent), next_step=next_step)
        if now - start > WAIT_S:
            raise FolderTakenError(what, where=str(path.parent), next_step=next_step)
        time.sleep(0.5)
