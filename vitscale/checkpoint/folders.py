"""Checkpoint folders: commit one, verify one, find the newest valid one.

A folder is either whole or absent. One save, as `commit_save` does it:

    all ranks   .step-N.ATTEMPT.tmp/rank-R.safetensors: write, hash on the way, fsync, read back
                from the disk
    to rank 0   size and hash of every rank's file
    rank 0      check that it sees all files in full; manifest.json, fsync; fsync of the folder;
                rename to step-N; fsync of the parent; remove checkpoints beyond `keep`
    to all      the result

Nothing is removed before the new step is durable and was read back. ATTEMPT is drawn anew at every
start, so files of a killed save are never mistaken for those of another.

A reader trusts a folder only if its manifest carries its own hash and every file agrees with the
size and hash it lists. All of it is checked before any tensor file is parsed; nothing is pickled.
Needs no torch: a login node has none, and a process that is killed at every system call of a save
starts in a tenth of a second.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import blake3

from vitscale.config.errors import StorageError, UserError, nearest
from vitscale.distributed.atomic_files import (
    blake3_of_file,
    commit_folder,
    json_text,
    make_folders,
    retried,
    write_new_file,
)

T = TypeVar("T")
Piece = bytes | memoryview
"""A part of a file."""
Listing = Mapping[str, Mapping[str, Any]]
"""Files of a checkpoint: name -> {bytes, blake3}."""
Score = Mapping[str, Any]
"""How good a checkpoint is, as `evaluation.main_metric.score_of` makes it; compared by `order`."""
Gather = Callable[[Any], list[Any]]
"""The values of all ranks, in their order, on every rank. Raises when a rank is gone."""
MANIFEST = "manifest.json"
FORMAT_VERSION = 2
STEP_FOLDER = re.compile(r"step-(\d{8,})")
# RUN@STEP: a step of a run. On the hub `@` names a revision.
AT_STEP = re.compile(r"(?!hf://)(.+)@(\d+)")
REMEDY = "use another checkpoint of the run"
ALLOWED_MODELS = (
    "a run folder (runs/NAME) or a checkpoint folder of it (checkpoints/step-N), a folder of timm "
    "or Hugging Face (config.json), a file (.npz, .safetensors, .pth), timm/NAME, or "
    "hf://OWNER/NAME"
)


def only_this_rank(value: Any) -> list[Any]:
    """`Gather` of a process alone."""
    return [value]


def _damaged(what: str, place: Path | str) -> UserError:
    return UserError(what, where=place, next_step=REMEDY)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed and verified checkpoint."""

    folder: Path
    step: int
    files: tuple[Path, ...]
    """For `store.read_tensors`."""
    progress: dict[str, Any]
    """Position of the run: JSON values."""
    description: dict[str, Any]
    """What the tensors are: architecture, grid, label map."""


def manifest_text(**body: Any) -> str:
    """The text of manifest.json for a step, its files, progress and description."""
    # As it will be read: keys become strings, tuples lists.
    body = json.loads(json.dumps(body | {"format_version": FORMAT_VERSION}))
    return json_text(body | {"manifest_blake3": _hash_of(body)})


def _hash_of(body: Mapping[str, Any]) -> str:
    # Sorted keys give the same bytes for the same content, and so the same hash.
    return blake3.blake3(json_text(body).encode()).hexdigest()


def read_checkpoint(
    folder: Path, *, rank: int = 0, world_size: int = 1, gather: Gather = only_this_rank
) -> Checkpoint:
    """Verify a checkpoint folder, hashes included; the ranks share the files.

    Raises UserError saying what is damaged, or StorageError, the same on all ranks.
    """
    error: UserError | None = None
    try:
        checkpoint = _read_share(folder, rank=rank, world_size=world_size)
    except UserError as caught:
        error = caught
    # Every rank raises the first error, so that none goes on with a checkpoint that others refuse.
    for each in gather(error):
        if each is not None:
            raise each
    return checkpoint


def _read_share(folder: Path, *, rank: int, world_size: int) -> Checkpoint:
    """What the manifest describes. Of the files, only this rank's share is verified."""
    path = folder / MANIFEST
    try:
        manifest = retried(lambda: read_manifest(path))
        if STEP_FOLDER.fullmatch(folder.name) and manifest["step"] != step_of(folder):
            step = manifest["step"]
            raise _damaged(f"belongs to step {step}, not to this folder", path)

        files: Listing = manifest["files"]
        for name in list(files)[rank::world_size]:
            retried(partial(verify_file, folder, name, files[name]))

        return Checkpoint(
            folder=folder,
            step=int(manifest["step"]),
            files=tuple(folder / name for name in files),
            progress=manifest["progress"],
            description=manifest["description"],
        )
    except UserError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        what = f"missing or unreadable ({error.strerror})"
        raise _damaged(what, error.filename or path) from None
    except OSError as error:
        raise StorageError(
            f"cannot be read ({error.strerror})",
            where=error.filename or path,
            next_step="run again once storage works, or move this checkpoint away",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not a checkpoint manifest ({type(error).__name__}: {error})"
        raise _damaged(what, path) from None


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest that agrees with its own hash. Raises UserError, OSError, ValueError or such."""
    manifest = json.loads(path.read_text())
    # The version comes first: another format may compute its hash differently.
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise UserError(
            f"format version {version!r} is unknown",
            where=path,
            allowed=str(FORMAT_VERSION),
            next_step=REMEDY,
        )
    if manifest.pop("manifest_blake3", None) != _hash_of(manifest):
        raise _damaged("does not match its own hash", path)
    return manifest


def verify_file(
    folder: Path, name: str, expected: Mapping[str, Any], *, from_disk: bool = False
) -> None:
    """Compare size and hash of a file. Raises OSError, or UserError if they differ."""
    # The name becomes a path: a manifest from elsewhere must not lead out of its folder.
    if Path(name).name != name or not name.endswith(".safetensors"):
        what = f"lists {name!r}, which is not a plain file name"
        raise UserError(what, where=folder)
    # A wrong size is found without reading the file.
    check_sizes(folder, {name: expected})
    if blake3_of_file(folder / name, from_disk=from_disk) != expected["blake3"]:
        raise _damaged("does not match its hash", folder / name)


def whole_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if sizes agree with it: the part of verification that reads no tensors."""
    try:
        manifest = retried(lambda: read_manifest(folder / MANIFEST))
        check_sizes(folder, manifest["files"])
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def best_of(folders: Iterable[Path]) -> tuple[Path, Score] | None:
    """The whole checkpoint with the best score, and that; of equal ones the earliest."""
    scored = []
    for folder in folders:
        manifest = whole_manifest(folder)
        # A checkpoint saved before the first evaluation has no score.
        if manifest is not None and (score := manifest["progress"].get("score")):
            scored.append((folder, score))
    # The step breaks ties, negated so that the earliest of equal scores wins.
    return max(
        scored, key=lambda each: (each[1]["order"], -step_of(each[0])), default=None
    )


def check_sizes(folder: Path, files: Listing) -> None:
    """Raise OSError or UserError unless all files are there and of the right size."""
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(f"has {size} bytes, expected {expected['bytes']}", path)


def step_folders(folder: Path) -> list[Path]:
    """Committed checkpoint folders, newest step first. Ordered by step, never by clock."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(steps, key=step_of, reverse=True)


def newest_checkpoint(
    folder: Path, **ranks: Any
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and a sentence for each newer one that is damaged.

    ranks: as for `read_checkpoint`; the folders are those that rank 0 finds. None only when there
    is no checkpoint at all.
    Raises UserError when there are some and none can be read, since starting over would overwrite
    them, and StorageError when storage fails.
    """
    gather = ranks.get("gather", only_this_rank)
    complaints = list[str]()
    for path in gather(step_folders(folder))[0]:
        try:
            return read_checkpoint(path, **ranks), complaints
        except StorageError:
            raise
        except UserError as error:
            # Its advice, another checkpoint, is followed here.
            shown = UserError(error.what, where=error.where)
            complaints.append(f"skipping damaged checkpoint: {shown}")

    if complaints:
        raise UserError(
            "\n".join(["holds checkpoints, but none that can be read", *complaints]),
            where=folder,
            next_step="restore their files, or move this folder away to start over",
        )
    return None, []


def place_of(path: str) -> Path:
    """The folder that a path means, or of RUN@STEP the checkpoint of that step."""
    named = AT_STEP.fullmatch(path)
    if named is None:
        return Path(path)
    run, step = named.groups()
    return Path(run, "checkpoints", f"step-{int(step):08d}")


def resolve_weights(
    path: str, *, key: str = "init", **ranks: Any
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that a setting means: one folder, RUN@STEP, or the newest valid one of a run
    folder.

    key: the setting, for errors. ranks: as for `read_checkpoint`; each verifies its share of the
    files.
    Returns it and a sentence for each newer one that is damaged. Raises UserError if there is none.
    """
    folder = place_of(path)
    gather = ranks.get("gather", only_this_rank)
    is_one = STEP_FOLDER.fullmatch(folder.name) and (folder / MANIFEST).is_file()
    # As rank 0 sees it, so that all verify the same.
    if gather(bool(is_one))[0]:
        return read_checkpoint(folder, **ranks), []
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints", **ranks)
    if checkpoint is not None:
        return checkpoint, complaints

    # A run keeps its newest checkpoints and the best one.
    kept = [str(step_of(each)) for each in step_folders(folder.parent)]
    if STEP_FOLDER.fullmatch(folder.name) and kept:
        raise UserError(
            f"the run has no checkpoint of step {step_of(folder)}",
            where=f"{key}={path}",
            allowed=f"the steps that are kept: {', '.join(reversed(kept))}",
            next_step="take one of them, or repeat the run with a larger checkpoint.keep",
        )
    what = "no such run or checkpoint folder"
    if folder.is_dir():
        what = "holds no checkpoint"
    # Runs next to the one that was named, or in the usual folder, show a misspelt name.
    parents = (Path("runs"), folder.parent)
    stores = [store for parent in parents for store in parent.glob("*/checkpoints/")]
    runs = {store.parent.name: store.parent for store in stores}
    best = nearest(folder.name, [*runs])
    step = f"did you mean {runs[best]}?" if best else "correct the path"
    raise UserError(what, where=f"{key}={path}", allowed=ALLOWED_MODELS, next_step=step)


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
    before_commit: Callable[[], None] | None = None
    """Called on rank 0 when all is written: flushes what the step is to come after."""
    overdue_at: float = math.inf
    """Until when storage may refuse saves, by `time.monotonic` of this rank; rank 0's counts."""

    @property
    def temporary(self) -> Path:
        return self.checkpoints / f".step-{self.step:08d}.{self.attempt}.tmp"

    @property
    def final(self) -> Path:
        return self.checkpoints / f"step-{self.step:08d}"


class OverdueError(StorageError):
    """Storage has refused saves for too long, the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A durable step: it survives power loss."""

    folder: Path
    step: int
    warnings: tuple[str, ...]
    """Problems that did not prevent it: old folders that could not be removed, say."""


def commit_save(
    save: Save, pieces: Iterable[Piece], *, gather: Gather = only_this_rank
) -> Commit:
    """Write this rank's tensors and commit the step once all ranks have.

    Every rank gathers twice, also after a UserError, so no rank waits for one that failed.
    Raises StorageError when a disk fails, or what `pieces` raises, the same on all ranks.
    """
    shares = gather(_result_of(save, lambda: _write_share(save, pieces)))

    warnings: list[str] | UserError = []
    if save.rank == 0:
        warnings = _result_of(save, lambda: _finish(save, shares))
        # The manifest was not committed, so these files are of no use to anyone.
        if isinstance(warnings, UserError):
            shutil.rmtree(save.temporary, ignore_errors=True)
        # Rank 0 decides for all: by its own clock each rank might decide differently.
        if isinstance(warnings, StorageError) and time.monotonic() > save.overdue_at:
            warnings = OverdueError(warnings.text())

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
            where=error.filename or save.checkpoints,
            next_step="free space or set output, then rerun the same command; committed "
            "checkpoints are untouched",
        )


def _write_share(save: Save, pieces: Iterable[Piece]) -> Listing:
    if save.rank == 0:
        # The remains of a killed save may fill the disk, so they are removed first.
        _remove_leftovers(save)
    name = f"rank-{save.rank:05d}.safetensors"
    written = _write(save, name, list(pieces))
    # Every rank checks its own file: one rank would take hours for those of hundreds.
    verify_file(save.temporary, name, written, from_disk=True)
    return {name: written}


def _write(save: Save, name: str, pieces: list[Piece]) -> dict[str, Any]:
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
    # One failed rank fails the save; its error keeps its kind, which decides about a restart.
    for rank, share in enumerate(shares):
        if isinstance(share, UserError):
            raise share if len(shares) == 1 else type(share)(f"rank {rank}: {share}")
        files |= share
    # They are missing here if the folder is on a disk that the nodes do not share.
    check_sizes(save.temporary, files)

    text = manifest_text(
        step=save.step,
        files=files,
        progress=save.progress,
        description=save.description,
    )
    _write(save, MANIFEST, [text.encode()])

    warnings = []
    try:
        if save.before_commit is not None:
            save.before_commit()
    except OSError as error:
        # A step is worth more than its log.
        note = f"{error.filename}: not flushed before a commit ({error.strerror})"
        warnings.append(f"warning: {note}")
    # A step that exists is damaged: the run has resumed from an older one.
    _set_aside(save.final)
    commit_folder(save.temporary, save.final)
    return warnings + _prune(save)


def _set_aside(folder: Path) -> None:
    """Rename a folder: one killed half-way through its removal must not look committed."""
    # Renamed first: removal takes time, and a rename is one step that cannot stop half-way.
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)


def _prune(save: Save) -> list[str]:
    """Keep the committed step, the newest valid ones before it, and the best; remove older ones.

    Later steps stay: they are damaged, the run resumed from before them, and training will write
    them again. Counting them would drop the step just committed.
    """
    kept = 1
    folders = step_folders(save.checkpoints)
    committed = [each for each in folders if step_of(each) <= save.step]

    try:
        best = best_of(committed)
        for folder in committed[1:]:
            # Damaged checkpoints do not count, or `keep` of them would leave none that can be read.
            if kept < save.keep and whole_manifest(folder):
                kept += 1
            elif best is None or folder != best[0]:
                _set_aside(folder)
        return _remove_leftovers(save)
    except OSError as error:
        # The new step is committed: a problem with old ones must not fail it.
        return [
            f"{error.filename}: old checkpoint could not be removed ({error.strerror})"
        ]


def _remove_leftovers(save: Save) -> list[str]:
    """Remove killed saves and old checkpoints; a sentence for each that cannot be removed."""
    warnings = []

    # The save in progress is the only temporary folder that is in use.
    for folder in {*save.checkpoints.glob(".step-*")} - {save.temporary}:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if folder.exists():
                warnings.append(f"{folder}: could not be removed ({error.strerror})")
    return warnings
