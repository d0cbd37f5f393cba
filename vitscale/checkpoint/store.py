"""Save the checkpoints of a run in the background, one after the other.

The thread first copies the tensors to host memory, while the next forward and backward pass read
the same weights; an update must wait for that copy (`wait_for_host_copy`), and for nothing else.
The threads of all ranks agree through a group of their own, whose collectives cannot cross with
those of the training. The outcome is read where all ranks are at the same point: at the next save
and in `wait`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from vitscale.checkpoint.folders import Checkpoint, Commit, Save, commit_save, newest_checkpoint
from vitscale.checkpoint.tensors import HostCopy
from vitscale.config.errors import DivergedError, StorageError
from vitscale.distributed.world import SAVES, World, control_group, gather_objects

# Longest that a save may take, and one rank's disk beyond another's.
LONGEST_SAVE_S = 3600.0
# When another error ends the run, its last save gets this long to be committed: the process ends
# soon, `processes.EXIT_S`.
PATIENCE_S = 4.0
# How long a run goes on while storage refuses its saves.
LONGEST_WITHOUT_S = 3600.0


class CheckpointStore:
    """The checkpoints of one run folder. As a context manager it waits for the last save.

    Collective, but for `wait_for_host_copy`, `take_committed` and `__exit__`.
    """

    def __init__(self, run_folder: Path, *, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = run_folder / "checkpoints", keep, world
        self._host_copy = HostCopy(world.device)
        self._copied = threading.Event()
        self._copied.set()
        self._attempt: str = gather_objects(uuid.uuid4().hex[:8])[0]
        self._group = control_group(SAVES, timeout=timedelta(seconds=LONGEST_SAVE_S))
        self._committed_at = time.monotonic()
        self._save: Future[Commit] | None = None

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """`newest_checkpoint`, the same on all ranks, which share the verification."""
        ranks = {"rank": self.world.rank, "world_size": self.world.world_size}
        return newest_checkpoint(self.folder, gather=gather_objects, **ranks)

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
        self._host_copy.prepare(tensors)
        self._copied.clear()
        save = Save(
            checkpoints=self.folder,
            step=step,
            attempt=self._attempt,
            rank=self.world.rank,
            keep=self.keep,
            progress=json.loads(json.dumps(progress)),  # the loop may change it later
            description=description,
        )
        self._save = Future()
        # A daemon: a process that must end does not wait for a disk that hangs.
        arguments = save, tensors, self._save
        threading.Thread(target=self._write, args=arguments, name="save", daemon=True).start()

    def wait_for_host_copy(self) -> None:
        """Wait until the tensors given to `save` may change: before an update of the weights."""
        self._copied.wait()

    def _write(
        self, save: Save, tensors: Mapping[str, torch.Tensor], outcome: Future[Commit]
    ) -> None:
        try:
            if self.world.device.type == "cuda":
                # A thread starts on GPU 0, where every rank of the node would open a context.
                torch.cuda.set_device(self.world.device)
            pieces = self._host_copy.take(tensors)
            self._copied.set()
            commit = commit_save(save, self._finite(save, pieces), gather=self._gather)
            outcome.set_result(commit)
        except BaseException as error:  # raised again on the main thread, by wait
            outcome.set_exception(error)
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
        save, self._save = self._save, None
        if save is None:
            return None
        try:
            commit = save.result(LONGEST_SAVE_S)
        except TimeoutError:
            what = "a checkpoint was not written in an hour: its storage hangs"
            raise StorageError(what, where=str(self.folder)) from None
        except StorageError as error:
            if say is None or time.monotonic() - self._committed_at > LONGEST_WITHOUT_S:
                raise
            say(
                f"warning: {str(error).splitlines()[0]}; training goes on, and ends after an hour "
                "without a checkpoint, or when the last one fails"
            )
            return None
        self._committed_at = time.monotonic()
        return commit

    def take_committed(self) -> Commit | None:
        """The last save, once, if it is committed by now. Never waits; not collective."""
        save = self._save
        if save is None or not save.done() or save.exception() is not None:
            return None
        return self.wait()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            self.wait()
        elif self._save is not None:
            # Another rank may be gone: the first error is the one to see, after a last try.
            problem: BaseException | str | None = "too slow"
            with suppress(TimeoutError):
                problem = self._save.exception(PATIENCE_S)
            if problem is not None:
                error.add_note(f"the last checkpoint was not committed ({problem})")
