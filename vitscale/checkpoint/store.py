"""Checkpoints that are either whole or not there.

Owns: the commit protocol, verification, fall-back, retention and the lock of a run folder.
Leaves out: what the tensors mean (`engine`) and when to save (the loops).

Protocol: every rank writes its tensors into `.step-N.tmp` and fsyncs; sizes and hashes of all ranks
go into manifest.json; the folder is renamed to `step-N`; the parent is fsynced. A reader trusts a
folder only if its manifest is there and every hash agrees. Nothing in it is pickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors_bytes

from vitscale.atomic_files import commit_folder, sha256_of_file, write_bytes, write_json
from vitscale.distributed import Ranks, agree_no_error, broadcast_object, gather_objects
from vitscale.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed and verified checkpoint."""

    folder: Path
    step: int
    files: tuple[str, ...]
    progress: dict[str, Any]
    """Where the run stood: JSON values."""
    description: dict[str, Any]
    """What the tensors are: architecture, grid, label map."""

    def tensors(self, *, prefix: str = "") -> dict[str, torch.Tensor]:
        """All tensors whose name starts with `prefix`, without it, on the CPU."""
        found = {}
        for name in self.files:
            with safe_open(self.folder / name, framework="pt") as file:
                for key in file.keys():
                    if key.startswith(prefix):
                        found[key.removeprefix(prefix)] = file.get_tensor(key)
        return found


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint folder, hashes included. Raises UserError saying what is damaged."""
    path = folder / MANIFEST
    remedy = "use another checkpoint of the run"
    try:
        manifest = json.loads(path.read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            version = manifest["format_version"]
            raise UserError(f"format version {version} is unknown", where=str(path))
        files = manifest["files"]
        for name, expected in files.items():
            file = folder / Path(name).name
            if (
                file.stat().st_size != expected["bytes"]
                or sha256_of_file(file) != expected["sha256"]
            ):
                raise UserError("does not match its hash", where=str(file), next_step=remedy)
        return Checkpoint(
            folder=folder,
            step=int(manifest["step"]),
            files=tuple(Path(name).name for name in files),
            progress=manifest["progress"],
            description=manifest["description"],
        )
    except OSError as error:
        what = f"missing or unreadable ({error.strerror})"
        raise UserError(what, where=str(error.filename or path), next_step=remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        what = f"not a checkpoint manifest ({type(error).__name__}: {error})"
        raise UserError(what, where=str(path), next_step=remedy) from None


def step_folders(folder: Path) -> list[Path]:
    """Committed checkpoint folders, newest step first. Ordered by step, never by clock."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and a sentence for each newer one that is damaged."""
    complaints: list[str] = []
    for path in step_folders(folder):
        try:
            return read_checkpoint(path), complaints
        except UserError as error:
            complaints.append(f"skipping damaged checkpoint: {error}")
    return None, complaints


class CheckpointStore:
    """The checkpoints of one run folder. Methods are collective."""

    def __init__(self, run_folder: Path, *, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = run_folder / "checkpoints", keep, ranks

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Rank 0 verifies, all ranks get the same answer: (checkpoint, complaints)."""
        return broadcast_object(newest_checkpoint(self.folder) if self.ranks.is_first else None)

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        progress: dict[str, Any],
        description: dict[str, Any],
    ) -> Path:
        """Write this rank's tensors and commit the step once all ranks have. Returns its folder."""
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".step-{step:08d}.tmp"
        with self._agreed():
            if self.ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        name = f"rank-{self.ranks.rank:05d}.safetensors"
        with self._agreed():
            write_bytes(temporary / name, to_safetensors_bytes(dict(tensors)))
        path = temporary / name
        entries = gather_objects(
            (name, {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)})
        )
        with self._agreed():
            if self.ranks.is_first:
                manifest = {
                    "format_version": FORMAT_VERSION,
                    "step": step,
                    "files": dict(entries),
                    "progress": progress,
                    "description": description,
                }
                write_json(temporary / MANIFEST, manifest)
                if final.exists():
                    # Only a damaged folder can be here: training goes on from the newest valid one.
                    shutil.rmtree(final)
                commit_folder(temporary, final)
                self._prune()
        return final

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """A disk error on one rank becomes a clear error on all; committed steps stay."""
        error = None
        try:
            yield
        except OSError as caught:
            error = (
                f"{caught.filename or self.folder}: checkpoint cannot be written "
                f"({caught.strerror})\n  next: free space or set output, then run the same command "
                "again; committed checkpoints are untouched"
            )
        agree_no_error(error)

    def _prune(self) -> None:
        """Remove old steps and abandoned temporary folders. The newest was just committed."""
        for path in step_folders(self.folder)[self.keep :]:
            # Renamed first: a folder killed half-way through removal must not look committed.
            doomed = path.with_name(f".{path.name}.old")
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def run_folder_lock(folder: Path, *, ranks: Ranks) -> Iterator[None]:
    """Refuse a second job in the same run folder. The lock ends with the process that holds it.

    A run that fails before it has written anything leaves no new folder behind.
    """
    with ExitStack() as stack:
        error = None
        if ranks.is_first:
            try:
                if not folder.exists():
                    stack.callback(_remove_if_unused, folder)
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(folder / ".lock", "w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                error = (
                    f"{folder}: another job is training in this run folder\n"
                    "  next: wait for it or stop it, or choose another name"
                )
            except OSError as caught:
                error = f"{folder}: cannot be used as run folder ({caught.strerror})"
        agree_no_error(error)
        yield


def _remove_if_unused(folder: Path) -> None:
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [".lock"]:
        shutil.rmtree(folder)


def resolve_weights(path: str) -> Checkpoint:
    """The checkpoint that `init=` means: one folder, or the newest valid one of a run folder.

    Raises UserError when there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file() and STEP_FOLDER.fullmatch(folder.name):
        return read_checkpoint(folder)
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        return checkpoint
    what = "holds no valid checkpoint" if folder.is_dir() else "no such run or checkpoint folder"
    raise UserError(
        "\n".join([what, *complaints]),
        where=f"init={path}",
        allowed="a run folder (runs/NAME) or a checkpoint folder (runs/NAME/checkpoints/step-N)",
        next_step="run pre-training first, or correct the path",
    )
