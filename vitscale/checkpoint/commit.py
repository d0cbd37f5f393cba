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
    Gather,
    Listing,
    check_sizes,
    looks_whole,
    manifest_text,
    only_this_rank,
    step_folder,
    step_folders,
    step_of,
    verify_file,
)
from vitscale.config.errors import StorageError, UserError
from vitscale.distributed.atomic_files import commit_folder, make_folders, write_new_file
from vitscale.distributed.retry import retried

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save on one rank."""

    checkpoints: Path
    step: int
    attempt: str
    """The same on all ranks, and not of an earlier save of this step."""
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


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A durable step: it survives power loss."""

    folder: Path
    step: int
    warnings: tuple[str, ...]
    """Problems after the commit: old folders that could not be removed."""


def commit_save(
    save: Save, pieces: Iterable[bytes | memoryview], *, gather: Gather = only_this_rank
) -> Commit:
    """Write this rank's tensors and commit the step once all ranks have.

    Every rank gathers twice, also after a UserError, so no rank waits for one that failed.
    Raises StorageError when a disk fails, or what `pieces` raises, the same on all ranks.
    """
    shares = gather(_result_of(save, lambda: _write_share(save, pieces)))
    warnings: list[str] | UserError = []
    if save.rank == 0:
        warnings = _result_of(save, lambda: _finish(save, shares))
        if isinstance(warnings, UserError):
            _remove([save.temporary])
    warnings = gather(warnings)[0]
    if isinstance(warnings, UserError):
        raise warnings
    return Commit(folder=save.final, step=save.step, warnings=tuple(warnings))


def _result_of(save: Save, work: Callable[[], T]) -> T | UserError:
    """The result, or the error that all ranks raise."""
    try:
        return work()
    except UserError as error:
        return error
    except OSError as error:
        return StorageError(
            f"checkpoint cannot be written ({error.strerror})",
            where=str(error.filename or save.checkpoints),
            next_step="free space or set output, then rerun the same command; committed "
            "checkpoints are untouched",
        )


def _write_share(save: Save, pieces: Iterable[bytes | memoryview]) -> Listing:
    if save.rank == 0:
        # First: the remains of a killed save may fill the disk.
        _remove(_leftovers(save))
    name = f"rank-{save.rank:05d}.safetensors"
    written = _write(save, name, list(pieces))
    # Every rank its own file: one rank would take hours for those of hundreds.
    verify_file(save.temporary, name, written, from_disk=True)
    return {name: written}


def _write(save: Save, name: str, pieces: list[bytes | memoryview]) -> dict[str, Any]:
    """Write a file of the temporary folder, several times if storage fails for a moment."""
    path = save.temporary / name

    def write() -> tuple[int, str]:
        make_folders(save.checkpoints)
        save.temporary.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # a part of it, after a failure
        return write_new_file(path, pieces)

    num_bytes, content = retried(write)
    return {"bytes": num_bytes, "blake3": content}


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
    _write(save, MANIFEST, [text.encode()])
    # A step that exists is damaged: the run has resumed from an older one.
    _set_aside(save.final)
    commit_folder(save.temporary, save.final)
    return _prune(save)


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
