"""Lock the folder of a run, and save its checkpoints in the background, one after the other.

The thread first copies the tensors to host memory, while the next forward and backward pass read
the same weights; an update must wait for that copy (`wait_for_host_copy`), and for nothing else.
The threads of all ranks agree through a group of their own, whose collectives cannot cross with
those of the training. The outcome is read where all ranks are at the same point: at the next save
and in `wait`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitscale.checkpoint.folders import (
    Checkpoint,
    Commit,
    OverdueError,
    Piece,
    Save,
    commit_save,
    newest_checkpoint,
)
from vitscale.config.errors import (
    DivergedError,
    FailureKind,
    FolderTakenError,
    StorageError,
    UserError,
    print_note,
)
from vitscale.distributed.atomic_files import Say, fsync_folder, retried
from vitscale.distributed.processes import end_now, node_name
from vitscale.distributed.world import (
    SAVES,
    World,
    control_group,
    errors_on_all_ranks,
    gather_objects,
)

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Tensors = Mapping[str, torch.Tensor]
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
# After SILENT_S without a touch a holder on another node is gone. Under SLURM a start waits for
# WAIT_S: the holder may be an attempt that is ending. The other ranks wait too, so not for longer.
BEAT_S = 5.0
SILENT_S = 20.0
WAIT_S = 30.0
# How long after a start has written its name another one's may still appear.
SETTLE_S = 1.0
HOLDER_BYTES = 256
# Longest time that a save may take, and that one rank's disk may need beyond another's.
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
        self.folder = run_folder / "checkpoints"
        self.keep = keep
        self.world = world
        self._host_copy = HostCopy(world.device)
        self._copied = threading.Event()
        # Nothing is being copied yet, so the first update need not wait.
        self._copied.set()
        # Drawn by rank 0, so that the files of all ranks are in the same folder.
        self._attempt: str = gather_objects(uuid.uuid4().hex[:8])[0]

        self._group = control_group(SAVES, timeout=timedelta(seconds=LONGEST_SAVE_S))
        self._committed_at = time.monotonic()
        self._save: Future[Commit] | None = None

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """`newest_checkpoint`, the same on all ranks, which share the verification."""
        return newest_checkpoint(
            self.folder,
            rank=self.world.rank,
            world_size=self.world.world_size,
            gather=gather_objects,
        )

    def save(
        self,
        tensors: Tensors,
        *,
        step: int,
        progress: dict[str, Any],
        description: dict[str, Any],
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Start saving this rank's tensors, which must not change before `wait_for_host_copy`.

        before_commit: called on rank 0, in the background.
        Waits for the save before it, see `wait`.
        """
        self.wait()
        # Memory is fetched here, since the event that marks the tensors belongs to this thread.
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
            before_commit=before_commit,
            overdue_at=self._committed_at + LONGEST_WITHOUT_S,
        )

        self._save = Future()
        # A daemon: a process that must end does not wait for a disk that hangs.
        work = partial(self._write, save, tensors, self._save)
        threading.Thread(target=work, name="save", daemon=True).start()

    def wait_for_host_copy(self) -> None:
        """Wait until the tensors given to `save` may change: before an update of the weights."""
        self._copied.wait()

    def _write(self, save: Save, tensors: Tensors, outcome: Future[Commit]) -> None:
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
            # After an error, too: the training thread would wait for the copy for ever.
            self._copied.set()

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        return gather_objects(value, group=self._group)

    def _finite(self, save: Save, pieces: list[Piece]) -> Iterator[Piece]:
        """The pieces; DivergedError before the first if this rank holds what is not finite.

        Raises OSError without a run folder: one that was moved must not come back with a
        checkpoint alone.
        """
        # The parent is the run folder, which `make_folders` would create again.
        os.stat(self.folder.parent)
        bad = self._host_copy.not_finite()
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise DivergedError(
                f"not saved: {bad[0]}{more} not finite by step {save.step}",
                where=self.folder,
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set optim.clip_norm=1 "
                "and resume from the newest checkpoint, which is finite",
            )

        yield from pieces

    def wait(self, *, say: Say | None = None) -> Commit | None:
        """Wait until the last save is committed. Returns it, unless it was taken before.

        Raises UserError, the same on all ranks, when it could not be. With `say`, storage may fail
        for an hour, and each save is a warning: the next one may succeed.
        """
        # Taken before the wait: a save that failed must not raise its error a second time.
        save = self._save
        self._save = None
        if save is None:
            return None
        try:
            commit = save.result(LONGEST_SAVE_S)
        except TimeoutError:
            what = "a checkpoint was not written in an hour: its storage hangs"
            raise StorageError(what, where=self.folder) from None
        except StorageError as error:
            if say is None or isinstance(error, OverdueError):
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
        # A save that failed is left to `wait`, which raises on all ranks at the same point.
        if save is None or not save.done() or save.exception() is not None:
            return None
        return self.wait()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        # An orderly end, also after a signal: the last checkpoint is worth the wait.
        if error is None or isinstance(error, SystemExit):
            self.wait()
        elif self._save is not None:
            # Another rank may be gone: the first error is the one to see, after a last try.
            problem: BaseException | str | None = "too slow"
            with suppress(TimeoutError):
                problem = self._save.exception(PATIENCE_S)
            if problem is not None:
                error.add_note(f"the last checkpoint was not committed ({problem})")


# ---- one job at a time --------------------------------------------------------------------------


class FolderBusyError(UserError):
    """Another job of a cluster may be ending in the run folder; a later start may succeed."""

    kind = FailureKind.OTHER


@contextmanager
def run_folder_lock(folder: Path, *, world: World) -> Iterator[None]:
    """Hold the run folder inside the block. Raises UserError, on all ranks, for a second job.

    `RUN/.lock` is locked by flock, names job and node of its holder, and is touched every BEAT_S.
    flock alone is not enough: some file systems have none, or one for each node, and NFS may keep
    that of a node that died.
    """
    with ExitStack() as stack:
        with errors_on_all_ranks(
            "cannot be used as run folder", folder, tried=world.is_first
        ):
            if world.is_first:
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                # Otherwise power loss could take the name, and every checkpoint with it.
                fsync_folder(folder.parent)
                stack.enter_context(_held(folder / ".lock"))
        yield


@contextmanager
def _held(path: Path) -> Iterator[None]:
    ending = threading.Event()

    def touch() -> None:
        while not ending.wait(BEAT_S):
            try:
                os.utime(path)
            except FileNotFoundError:
                if not ending.is_set():
                    _end_without(path.parent)
            except OSError:
                pass  # storage that fails may come back

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "rb+", buffering=0) as file:
        # Otherwise loader workers, which outlive a killed rank by seconds, would hold the lock.
        os.register_at_fork(after_in_child=file.close)
        _acquire(path, descriptor)

        threading.Thread(target=touch, name="run-folder-lock", daemon=True).start()
        try:
            yield
        finally:
            ending.set()
            # An empty file means no holder, so the next start does not wait.
            with suppress(OSError):
                os.truncate(descriptor, 0)


def _end_without(folder: Path) -> None:
    """End this process, whose run folder is gone. The main thread may wait for other ranks."""
    error = StorageError(
        "was moved or removed during the training",
        where=folder,
        next_step="start the run again from where its folder is now; it resumes",
    )
    print_note(f"error: {error}")
    end_now(error.kind.exit_code)


def _acquire(path: Path, descriptor: int) -> None:
    """Return when this process is the holder. Raises UserError when somebody else is."""
    job = os.environ.get("SLURM_JOB_ID")
    process = f"job {job}" if job else f"process {os.getpid()}"
    name = f"{process} on {node_name()}"
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

        # A holder that touches the file is alive, whatever the lock says.
        now = time.monotonic()
        holder = read_holder(path)
        beat = path.stat().st_mtime_ns
        if beat != last:
            last = beat
            touched = now
        is_gone = not holder or now - touched > SILENT_S
        # On one node flock is right, even just after a kill.
        is_here = bool(locked) and holder.endswith(f" on {node_name()}")
        if is_here or (locked is not False and is_gone):
            _write_holder(descriptor, name)
            if locked and not job:
                return
            # Another node may have found the folder free, too: the later one has it.
            took_s = time.monotonic() - now
            # The other write may still be on its way; ours shows how slow storage is.
            time.sleep(max(SETTLE_S, 2 * took_s))
            holder = read_holder(path)
            if holder == name:
                return
            last = path.stat().st_mtime_ns
            touched = time.monotonic()

        # Outside SLURM nobody ends the other job, so that waiting is of no use.
        is_in_use = not job and (locked is False or last != first)
        if is_in_use or time.monotonic() - start > WAIT_S:
            kind = FolderTakenError if is_in_use else FolderBusyError
            what = "another job is training in this run folder"
            if holder:
                what += f": {holder}"
            step = "wait for it or stop it, or choose another name"
            raise kind(what, where=path.parent, next_step=step)
        time.sleep(0.5)


def _write_holder(descriptor: int, holder: str) -> None:
    """Write a name over another one of any length.

    In one write: of two at the same moment the later one remains, and no mixture.
    """
    os.pwrite(descriptor, holder.encode().ljust(HOLDER_BYTES), 0)
    os.fsync(descriptor)


def read_holder(path: Path) -> str:
    """The job and node that a lock file names, as another node sees it; empty for none."""
    return path.read_text(errors="replace").strip()


# ---- tensors as safetensors files ---------------------------------------------------------------
# https://huggingface.co/docs/safetensors: 8 bytes of header length, JSON header, data. Written here
# because the library wants all bytes at once, which would double the host memory.


class HostCopy:
    """One copy of a rank's tensors in host memory, laid out as the data of a tensor file.

    Kept from save to save: fresh memory costs more than the copy (page faults), and copies from a
    GPU need pinned memory to be fast, which is slow to get.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Get the memory for these tensors, as they are after the kernels queued so far."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._places.clear()  # they would keep a replaced buffer alive
        if self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if self._stream is not None and num_bytes:
                pin_in_place(self._buffer)
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def take(self, tensors: Tensors) -> list[Piece]:
        """Copy the prepared tensors. Returns the file's bytes in pieces, valid until next time.

        On a GPU the copy runs concurrently with the kernels of the training thread.
        """
        # Widest first, as the library does, so that every tensor is aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and self._ready is not None:
                # The kernels that computed these tensors run on the training's stream.
                self._stream.wait_event(self._ready)

            header: dict[str, object] = {}
            end = 0
            for name in order:
                tensor = tensors[name]
                start = end
                end += tensor.nbytes
                place = self._buffer[start:end].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)
                self._places[name] = place
                header[name] = {
                    "dtype": DTYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [start, end],
                }
            if self._stream is not None:
                self._stream.synchronize()

        text = json.dumps(header, separators=(",", ":")).encode()
        # The header is padded to 8 bytes, so that the data behind it is aligned.
        text += b" " * (-len(text) % 8)
        return [len(text).to_bytes(8, "little") + text, self._buffer.numpy().data]

    def not_finite(self) -> list[str]:
        """Names of the tensors copied last that hold a NaN or an infinity."""
        return [
            name
            for name, place in self._places.items()
            if place.is_floating_point() and place.numel()
            # Ten times as fast as isfinite; NaN is the least and the greatest of everything.
            if not all(map(math.isfinite, torch.aminmax(place)))
        ]


def pin_in_place(buffer: torch.Tensor) -> None:
    """Pin a buffer while it lives; torch's own pinned memory is rounded up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr()).atexit = False


SLICE = re.compile(r"(?P<name>.+)@(?P<start>\d+)/(?P<shape>[\dx]*)")
LENGTH_BYTES = 8


def slice_name(name: str, *, start: int, shape: Iterable[int]) -> str:
    """Name of a one-dimensional piece: elements from `start` of a tensor of `shape`, flattened."""
    return f"{name}@{start}/{'x'.join(map(str, shape))}"


class Slice(NamedTuple):
    """Consecutive elements of a flattened tensor in a file."""

    start: int
    num_elements: int
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """As the file names it: F32, BF16, ..."""
    path: str
    offset: int
    """First byte in the file."""


def read_header(path: Path) -> list[Slice]:
    """What a verified file holds. Raises OSError."""

    def read() -> tuple[int, dict[str, Any]]:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return length, json.loads(file.read(length))

    length, header = retried(read)
    header.pop("__metadata__", None)
    slices = []
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        start = 0
        num_elements = math.prod(shape)
        # A rank under ZeRO has pieces of flattened tensors; other names stand for whole tensors.
        piece = SLICE.fullmatch(name)
        if piece is not None:
            name = piece["name"]
            start = int(piece["start"])
            shape = tuple(int(size) for size in piece["shape"].split("x") if size)

        offset = LENGTH_BYTES + length + entry["data_offsets"][0]
        slices.append(
            Slice(start, num_elements, name, shape, entry["dtype"], str(path), offset)
        )
    return slices


def read_tensors(files: Iterable[Path], *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU whose names start with `prefix`, which is removed."""
    slices = [piece for path in files for piece in read_header(path)]
    names = dict.fromkeys(piece.name for piece in slices)
    with SavedTensors(slices) as saved:
        return {
            name.removeprefix(prefix): saved.whole(name)
            for name in names
            if name.startswith(prefix)
        }


class SavedTensors(ExitStack):
    """Reads ranges of a checkpoint's tensors; memory for one range at a time.

    As a context manager it closes its files.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        """slices: of all files, in any order."""
        super().__init__()
        self._slices: dict[str, list[Slice]] = {}
        for piece in slices:
            self._slices.setdefault(piece.name, []).append(piece)
        self._open: dict[str, FileIO] = {}

    def part(self, name: str, start: int, num_elements: int) -> torch.Tensor:
        """Elements from `start` of a flattened tensor, on the CPU. Raises OSError."""
        slices = self._slices[name]
        dtype = TORCH_DTYPES[slices[0].dtype]
        values = torch.empty(num_elements, dtype=dtype)
        num_read = 0
        for piece in slices:
            # The overlap of the range that is wanted with the range that this file has.
            first = max(start, piece.start)
            last = min(start + num_elements, piece.start + piece.num_elements)
            if first < last:
                into = values[first - start : last - start].view(torch.uint8)
                offset = piece.offset + (first - piece.start) * dtype.itemsize
                retried(partial(self._read, piece.path, offset, into=into))
                num_read += last - first
        assert num_read == num_elements, f"slices of {name} overlap or do not cover it"
        return values

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises OSError."""
        shape = self._slices[name][0].shape
        return self.part(name, 0, math.prod(shape)).view(shape)

    def _read(self, path: str, offset: int, *, into: torch.Tensor) -> None:
        if path not in self._open:
            self._open[path] = self.enter_context(FileIO(path))
        left = into.numpy().data
        while left:
            # A read may return less than was asked for, and never more than 2 GiB.
            count = os.preadv(self._open[path].fileno(), [left], offset)
            if count == 0:
                raise OSError(f"{path} has become shorter")
            left = left[count:]
            offset += count
