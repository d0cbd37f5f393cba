"""Save the checkpoints of a run in the background, one after the other.

Owns: the thread that writes, agreement between the ranks' threads, and the lock of a run folder.
Leaves out: the commit protocol (`commit`), reading (`folders`), what the tensors mean (`engine`)
and when to save (the loops).

The thread first copies the tensors to host memory, while the next forward and backward pass read
the same weights; an update must wait for that copy (`wait_for_host_copy`), and for nothing else.
The threads of all ranks agree through a group of their own, whose collectives cannot cross with
those of the training. The outcome is read where all ranks are at the same point: at the next save
and in `wait`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from vitscale.checkpoint.commit import Commit, Save, commit_save
from vitscale.checkpoint.folders import (
    Checkpoint,
    checkpoint_to_resume,
    read_description,
    step_folders,
    verify_share,
)
from vitscale.checkpoint.tensors import HostCopy
from vitscale.config.errors import DivergedError, StorageError, UserError
from vitscale.distributed.events import EVENTS_NAME
from vitscale.distributed.world import (
    SAVES,
    World,
    broadcast_object,
    control_group,
    errors_on_all_ranks,
    gather_objects,
)

T = TypeVar("T")
# Longest that a save may take, and one rank's disk beyond another's.
LONGEST_SAVE_S = 3600.0
# When another error ends the run, its last save gets this long to be committed: the process ends
# soon, `exit.EXIT_S`.
PATIENCE_S = 4.0
# How long a run goes on while storage refuses its saves.
LONGEST_WITHOUT_S = 3600.0


class CheckpointStore:
    """The checkpoints of one run folder.

    Collective, but for `wait_for_host_copy`, `finished`, `take_committed` and `__exit__`.

    As a context manager it waits for the last save.
    """

    def __init__(self, run_folder: Path, *, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = run_folder / "checkpoints", keep, world
        self._host_copy = HostCopy(world.device)
        self._copied = threading.Event()
        self._copied.set()
        self._name: str = broadcast_object(uuid.uuid4().hex[:8])
        self._group = control_group(SAVES, timeout=timedelta(seconds=LONGEST_SAVE_S))
        self._num_saves, self._committed_at = 0, time.monotonic()
        self._thread: threading.Thread | None = None
        self._commit: Commit | None = None
        self._error: BaseException | None = None

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The same (checkpoint, complaints) on all ranks, which share the verification.

        Raises UserError, on all ranks, when there are checkpoints and none can be read.
        """
        folders = self._of_first_rank(lambda: step_folders(self.folder))
        return checkpoint_to_resume(self.folder, folders, read=self._read)

    def _read(self, folder: Path) -> Checkpoint:
        """`read_checkpoint`, each file hashed by one rank."""
        checkpoint, listing = self._of_first_rank(lambda: read_description(folder))
        rank, world_size = self.world.rank, self.world.world_size
        damage = verify_share(folder, listing, rank=rank, world_size=world_size)
        for found in gather_objects(damage):
            if found is not None:
                raise found
        return checkpoint

    def _of_first_rank(self, work: Callable[[], T]) -> T:
        """The result of rank 0, or its error, on every rank."""
        value = None
        with errors_on_all_ranks("cannot be read", self.folder):
            if self.world.is_first:
                value = work()
        return cast(T, broadcast_object(value))

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        progress: dict[str, Any],
        description: dict[str, Any],
    ) -> None:
        """Start saving this rank's tensors, which must not change before `wait_for_host_copy`.

        Waits for the save before it, see `wait`.
        """
        self.wait()
        ready = self._host_copy.prepare(tensors)
        self._copied.clear()
        self._num_saves += 1
        save = Save(
            checkpoints=self.folder,
            step=step,
            attempt=f"{self._name}-{self._num_saves}",
            rank=self.world.rank,
            keep=self.keep,
            progress=json.loads(json.dumps(progress)),  # the loop may change it later
            description=description,
        )
        # A daemon: a process that must end does not wait for a disk that hangs.
        self._thread = threading.Thread(
            target=self._write, args=(save, tensors, ready), name=f"save step {step}", daemon=True
        )
        self._thread.start()

    def wait_for_host_copy(self) -> None:
        """Wait until the tensors given to `save` may change: before an update of the weights."""
        self._copied.wait()

    def _write(
        self, save: Save, tensors: Mapping[str, torch.Tensor], ready: torch.cuda.Event | None
    ) -> None:
        try:
            if self.world.device.type == "cuda":
                # A thread starts on GPU 0, where every rank of the node would open a context.
                torch.cuda.set_device(self.world.device)
            pieces = self._host_copy.take(tensors, after=ready)
            self._copied.set()
            self._commit = commit_save(save, self._finite(save, pieces), gather=self._gather)
        except BaseException as error:  # raised again on the main thread, by wait
            self._error = error
        finally:
            self._copied.set()

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_objects(value, group=self._group)

    def _finite(self, save: Save, pieces: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The pieces; DivergedError before the first if this rank holds what is not finite."""
        if bad := self._host_copy.not_finite():
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise DivergedError(
                f"not saved: {bad[0]}{more} not finite by step {save.step}",
                where=str(self.folder),
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set optim.clip_norm=1 "
                "and resume from the newest checkpoint, which is finite",
            )
        yield from pieces

    def wait(self, *, say: Callable[[str], None] | None = None) -> Commit | None:
        """Wait until the last save is committed. Returns it, unless it was taken before.

        Raises UserError, the same on all ranks, when it could not be. With `say`, storage may fail
        for an hour, and each save is a warning: the next one may succeed.
        """
        if self._thread is None:
            return self.take_committed()
        self._thread.join(LONGEST_SAVE_S)
        if self._thread.is_alive():
            what = f"{self._thread.name}: not written in an hour: its storage hangs"
            raise StorageError(what, where=str(self.folder))
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._committed_at = time.monotonic()
            return self.take_committed()
        is_late = time.monotonic() - self._committed_at > LONGEST_WITHOUT_S
        if say is None or not isinstance(error, StorageError) or is_late:
            raise error
        say(
            f"warning: {str(error).splitlines()[0]}; training goes on, and ends after an hour "
            "without a checkpoint, or when the last one fails"
        )
        return None

    def finished(self) -> bool:
        """Whether this rank has nothing left to write. Never waits; not collective."""
        return self._thread is None or not self._thread.is_alive()

    def take_committed(self) -> Commit | None:
        """The last save, once, if it is committed by now. Never waits; not collective."""
        commit, self._commit = self._commit, None
        return commit

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            self.wait()
        elif self._thread is not None:
            # Another rank may be gone: the first error is the one to see, after a last try.
            self._thread.join(PATIENCE_S)
            if self._error is not None or self._thread.is_alive():
                error.add_note(f"{self._thread.name}: not committed ({self._error or 'too slow'})")


@contextmanager
def run_folder_lock(folder: Path, *, world: World) -> Iterator[None]:
    """Refuse a second job in the same run folder. The lock ends with the process that holds it.

    A run that fails before it has written anything leaves no new folder.
    """
    with ExitStack() as stack:
        with errors_on_all_ranks("cannot be used as run folder", folder):
            if world.is_first:
                if not folder.exists():
                    stack.callback(_remove_if_unused, folder)
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                file = stack.enter_context(open(folder / ".lock", "w"))
                # Or loader workers, which outlive a killed rank by seconds, would hold the lock.
                os.register_at_fork(after_in_child=file.close)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        "another job is training in this run folder",
                        where=str(folder),
                        next_step="wait for it or stop it, or choose another name",
                    ) from None
        yield


def _remove_if_unused(folder: Path) -> None:
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock", EVENTS_NAME}:
        # Renamed first: another rank may record its failure meanwhile, in a folder still there.
        unused = folder.with_name(f".{folder.name}.unused-{os.getpid()}")
        folder.rename(unused)
        shutil.rmtree(unused)
