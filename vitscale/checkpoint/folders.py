"""Read checkpoint folders: names, manifest, verification, the newest valid one.

Owns: the format of manifest.json and what counts as valid. Needs no torch until tensors are read.
Leaves out: writing (`commit`), ranks (`store`), what the tensors mean (`engine`).

A reader trusts a folder only if its manifest carries its own hash and every file agrees with the
size and hash it lists. All of it is checked before any tensor file is parsed; nothing is pickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

from vitscale.config.errors import StorageError, UserError, nearest
from vitscale.distributed.atomic_files import blake3_of_file, json_text
from vitscale.distributed.retry import retried

if TYPE_CHECKING:
    import torch

Listing = Mapping[str, Mapping[str, Any]]
"""Files of a checkpoint: name -> {bytes, blake3}."""
Gather = Callable[[Any], list[Any]]
"""The values of all ranks, in their order, on every rank. Raises when a rank is gone."""
MANIFEST = "manifest.json"
FORMAT_VERSION = 2
STEP_FOLDER = re.compile(r"step-(\d{8,})")
REMEDY = "use another checkpoint of the run"


def only_this_rank(value: Any) -> list[Any]:
    """`Gather` of a process alone."""
    return [value]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed and verified checkpoint."""

    folder: Path
    step: int
    files: tuple[str, ...]
    progress: dict[str, Any]
    """Position of the run: JSON values."""
    description: dict[str, Any]
    """What the tensors are: architecture, grid, label map."""

    def tensors(self, *, prefix: str = "") -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU, of names that start with `prefix`, which is removed."""
        # Imported late: torch takes seconds, and verification needs none.
        from vitscale.checkpoint.tensors import read_tensors

        return read_tensors([self.folder / name for name in self.files], prefix=prefix)


def manifest_text(
    *,
    step: int,
    files: Listing,
    progress: Mapping[str, Any],
    description: Mapping[str, Any],
) -> str:
    """The text of manifest.json."""
    body = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "files": files,
        "progress": progress,
        "description": description,
    }
    # As it will be read: keys become strings, tuples lists.
    body = json.loads(json.dumps(body))
    return json_text(body | {"manifest_blake3": _hash_of(body)})


def _hash_of(body: Mapping[str, Any]) -> str:
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
            what = f"belongs to step {manifest['step']}, not to this folder"
            raise UserError(what, where=str(path), next_step=REMEDY)
        files: Listing = manifest["files"]
        for name in list(files)[rank::world_size]:
            retried(partial(verify_file, folder, name, files[name]))
        return Checkpoint(
            folder=folder,
            step=int(manifest["step"]),
            files=tuple(files),
            progress=manifest["progress"],
            description=manifest["description"],
        )
    except UserError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        what = f"missing or unreadable ({error.strerror})"
        raise UserError(what, where=str(error.filename or path), next_step=REMEDY) from None
    except OSError as error:
        raise StorageError(
            f"cannot be read ({error.strerror})",
            where=str(error.filename or path),
            next_step="run again once storage works, or move this checkpoint away",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not a checkpoint manifest ({type(error).__name__}: {error})"
        raise UserError(what, where=str(path), next_step=REMEDY) from None


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest that agrees with its own hash.

    Raises UserError, OSError, ValueError or such.
    """
    manifest = json.loads(path.read_text())
    if (version := manifest["format_version"]) != FORMAT_VERSION:
        what = f"format version {version!r} is unknown"
        raise UserError(what, where=str(path), allowed=str(FORMAT_VERSION), next_step=REMEDY)
    if manifest.pop("manifest_blake3", None) != _hash_of(manifest):
        raise UserError("does not match its own hash", where=str(path), next_step=REMEDY)
    return manifest


def verify_file(
    folder: Path, name: str, expected: Mapping[str, Any], *, from_disk: bool = False
) -> None:
    """Compare size and hash of a file. Raises OSError, or UserError if they differ."""
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise UserError(f"lists {name!r}, which is not a plain file name", where=str(folder))
    check_sizes(folder, {name: expected})
    if blake3_of_file(folder / name, from_disk=from_disk) != expected["blake3"]:
        raise UserError("does not match its hash", where=str(folder / name), next_step=REMEDY)


def looks_whole(folder: Path) -> bool:
    """Whether manifest and sizes agree: the part of verification that reads no tensors."""
    try:
        check_sizes(folder, read_manifest(folder / MANIFEST)["files"])
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_sizes(folder: Path, files: Listing) -> None:
    """Raise OSError or UserError unless all files are there and of the right size."""
    for name, expected in files.items():
        found = (folder / name).stat().st_size
        if found != expected["bytes"]:
            what = f"has {found} bytes, expected {expected['bytes']}"
            raise UserError(what, where=str(folder / name), next_step=REMEDY)


def step_folders(folder: Path) -> list[Path]:
    """Committed checkpoint folders, newest step first. Ordered by step, never by clock."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    return sorted(steps, key=step_of, reverse=True)


def newest_checkpoint(
    folder: Path,
    folders: Sequence[Path] | None = None,
    *,
    read: Callable[[Path], Checkpoint] = read_checkpoint,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and a sentence for each newer one that is damaged.

    folders: its step folders, if they are known. None only when there is no checkpoint at all.
    Raises UserError when there are some and none can be read, since starting over would overwrite
    them, and StorageError when storage fails.
    """
    complaints: list[str] = []
    for path in step_folders(folder) if folders is None else folders:
        try:
            return read(path), complaints
        except StorageError:
            raise
        except UserError as error:
            shown = UserError(error.what, where=error.where)  # the next step is done here
            complaints.append(f"skipping damaged checkpoint: {shown}")
    if complaints:
        raise UserError(
            "\n".join(["holds checkpoints, but none that can be read", *complaints]),
            where=str(folder),
            next_step="restore their files, or move this folder away to start over",
        )
    return None, []


def resolve_weights(path: str, *, key: str = "init") -> tuple[Checkpoint, list[str]]:
    """The checkpoint that a setting means: one folder, or the newest valid one of a run folder.

    key: the setting, for errors.
    Returns it and a sentence for each newer one that is damaged. Raises UserError if there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file() and STEP_FOLDER.fullmatch(folder.name):
        return read_checkpoint(folder), []
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        return checkpoint, complaints
    what = "holds no checkpoint" if folder.is_dir() else "no such run or checkpoint folder"
    best = nearest(folder.name, [each.parent.name for each in folder.parent.glob("*/checkpoints/")])
    raise UserError(
        what,
        where=f"{key}={path}",
        allowed="a run folder (runs/NAME) or a checkpoint folder (runs/NAME/checkpoints/step-N)",
        next_step=f"did you mean {folder.parent / best}?"
        if best
        else "run pre-training first, or correct the path",
    )
