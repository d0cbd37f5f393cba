"""The commit protocol: a checkpoint folder is either whole or absent.

Owns: one save from the first byte to the last fsync, seen from one rank, and retention.
Leaves out: threads and messages of ranks (`store`), reading (`folders`). Needs no torch, so that a
process that is killed at every system call starts in a tenth of a second.

    all ranks   .step-N.ATTEMPT.tmp/rank-R.safetensors: write, hash on the way, fsync, read back
                from the disk
    to rank 0   size and hash of every rank's file
    rank 0      check that it sees all files in full; manifest.json, fsync; fsync of the folder;
                rename to step-N; fsync of the parent; remove checkpoints beyond `keep`
    to all      the result

Nothing is removed before the new step is durable and was read back. ATTEMPT is drawn anew for every
save, so files of a killed save are never mistaken for those of another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vitscale.checkpoint.folders import (
    MANIFEST,
    Listing,
    check_sizes,
    looks_whole,
    manifest_text,
    read_checkpoint,
    step_folder,
    step_folders,
    step_of,
    verify_files,
)
from vitscale.config.errors import PeerLostError, StorageError, UserError
from vitscale.distributed.atomic_files import commit_folder, make_folders, write_new_file
from vitscale.distributed.retry import retried

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""The values of all ranks, in their order, on every rank. Raises when a rank is gone."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save on one rank."""

    checkpoints: Path
    step: int
    attempt: str
    """The same on all ranks, and never used before."""
    rank: int
    keep: int
    progress: Mapping[str, Any]
    description: Mapping[str, Any]

    @property
    def temporary(self) -> Path:
        return self.checkpoints / f".step-{self.step:08d}.{self.attempt}.tmp"

    @property
    def final(self) -> Path:
        return step_folder(self.checkpoints, self.step)

    @property
    def file_name(self) -> str:
        return f"rank-{self.rank:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A durable step: it survives power loss."""

    folder: Path
    step: int
    warnings: tuple[str, ...]
    """Problems after the commit: old folders that could not be removed."""


def commit_save(
    save: Save,
    pieces: Iterable[bytes | memoryview],
    *,
    gather: Gather = lambda value: [value],
) -> Commit:
    """Write this rank's tensors and commit the step once all ranks have.

    Every rank gathers twice, also after an error, so no rank waits for one that failed.
    Raises StorageError, the same on all ranks, when a disk fails.
    """
    share, defect = _result_of(save, lambda: _write_share(save, pieces))
    shares = gather(share)
    warnings: list[str] | UserError = []
    if save.rank == 0:
        warnings, own_defect = _result_of(save, lambda: _finish(save, shares))
        defect = defect or own_defect
        if isinstance(warnings, UserError):
            _remove([save.temporary])
    warnings = gather(warnings)[0]
    if defect is not None:
        raise defect
    if isinstance(warnings, UserError):
        raise warnings
    return Commit(folder=save.final, step=save.step, warnings=tuple(warnings))


def _result_of(save: Save, work: Callable[[], T]) -> tuple[T | UserError, Exception | None]:
    """The result or error for all ranks, and a defect of this code for this rank to raise."""
    try:
        return work(), None
    except UserError as error:
        return error, None
    except OSError as error:
        return StorageError(
            f"checkpoint cannot be written ({error.strerror})",
            where=str(error.filename or save.checkpoints),
            next_step="free space or set output, then rerun the same command; committed "
            "checkpoints are untouched",
        ), None
    except Exception as error:
        what = f"checkpoint of step {save.step}: {type(error).__name__}: {error}"
        return PeerLostError(what), error


def _write_share(save: Save, pieces: Iterable[bytes | memoryview]) -> Listing:
    if save.rank == 0:
        # First: the remains of a killed save may fill the disk.
        _remove(_leftovers(save))
    whole = list(pieces)

    def write() -> tuple[int, str]:
        make_folders(save.checkpoints)
        save.temporary.mkdir(exist_ok=True)
        return _write_again(save.temporary / save.file_name, whole)

    num_bytes, content = retried(write)
    listing = {save.file_name: {"bytes": num_bytes, "blake3": content}}
    # Every rank its own file: one rank would take hours for those of hundreds.
    verify_files(save.temporary, listing, from_disk=True)
    return listing


def _write_again(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """`write_new_file`, in place of what an attempt before has left."""
    path.unlink(missing_ok=True)
    return write_new_file(path, pieces)


def _finish(save: Save, shares: list[Listing | UserError]) -> list[str]:
    """Rank 0, when all have written and read back: manifest, rename, retention."""
    files: dict[str, Mapping[str, Any]] = {}
    for rank, share in enumerate(shares):
        if isinstance(share, UserError):
            raise share if len(shares) == 1 else type(share)(f"rank {rank}: {share}")
        files |= share
    # Not so if the folder is on a disk that the nodes do not share.
    check_sizes(save.temporary, files)
    text = manifest_text(
        step=save.step, files=files, progress=save.progress, description=save.description
    )
    retried(lambda: _write_again(save.temporary / MANIFEST, [text.encode()]))
    if _is_committed(save):
        _remove([save.temporary])
    else:
        _set_aside(save.final)
        commit_folder(save.temporary, save.final)
    return _prune(save)


def _is_committed(save: Save) -> bool:
    """Whether this step exists and is valid; then it stays, since during a replacement neither
    would exist."""
    try:
        read_checkpoint(save.final)
    except UserError:
        return False
    return True


def _set_aside(folder: Path) -> None:
    """Rename a folder: one killed half-way through its removal must not look committed."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.old")
        _remove([doomed])
        os.rename(folder, doomed)


def _prune(save: Save) -> list[str]:
    """Keep the committed step and the newest valid ones before it; remove older ones.

    Later steps stay: they are damaged, the run resumed from before them, and training will write
    them again. Counting them would drop the step just committed.
    """
    kept = 1
    try:
        for folder in step_folders(save.checkpoints):
            if step_of(folder) >= save.step:
                continue
            if kept < save.keep and looks_whole(folder):
                kept += 1
            else:
                _set_aside(folder)
        return _remove(_leftovers(save))
    except OSError as error:
        return [f"{error.filename}: old checkpoint could not be removed ({error.strerror})"]


def _leftovers(save: Save) -> list[Path]:
    """Folders of killed saves and partly removed checkpoints."""
    return [path for path in save.checkpoints.glob(".step-*") if path != save.temporary]


def _remove(folders: Iterable[Path]) -> list[str]:
    """Remove folders; a sentence for each one that cannot be removed."""
    warnings = []
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            warnings.append(f"{folder}: could not be removed ({error.strerror})")
    return warnings
