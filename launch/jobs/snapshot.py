"""Copy the submitted code into the job folder, so that later edits do not reach the job.

Owns: which files, the limit of their size, and the folder code-HASH, named by its content.
Leaves out: making a job import from it (`submission`), and git (`source_version`).

Equal submissions share a snapshot. It contains the code folders' tracked files as they are on disk,
untracked files that git does not ignore, compiled extensions, and a record of the version.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import blake3

from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import commit_folder, json_text
from vitscale.runs.launching import LaunchSettings
from vitscale.tracking.source_version import (
    PROJECT_ROOT,
    RECORD_NAME,
    list_files,
    source_version,
)

MAX_BYTES = 64_000_000
# Ignored by git and needed by the code.
EXTENSIONS = "vitscale/**/*.so"


Code = dict[str, tuple[bytes, int]]
"""Path below the root -> content and mode, with the record of the version."""


def kept_code(launch: LaunchSettings, folder: Path) -> Path | None:
    """The snapshot of the code in a job folder, written if it is not there yet.

    None if `launch` wants none, or without git: an installed package, or a tarball. Then the job
    runs the code on disk, of which a warning is printed.
    Raises UserError if it cannot be written.
    """
    if not launch.snapshot:
        return None
    code = read_code()
    if code is None:
        _warn_without_git()
        return None
    return store_code(code, folder)


def planned_folder(launch: LaunchSettings, folder: Path) -> Path | None:
    """Where `kept_code` would put the snapshot. Writes nothing."""
    code = read_code() if launch.snapshot else None
    return None if code is None else folder / folder_name(code)


@lru_cache(maxsize=1)
def _warn_without_git() -> None:
    print(
        f"warning: {PROJECT_ROOT} is no git checkout, so the job gets no copy of the code: it runs "
        "what is there when it starts",
        file=sys.stderr,
        flush=True,
    )


def read_code(root: Path = PROJECT_ROOT) -> Code | None:
    """Read the code that jobs run. None without git: an installed package, or a tarball.

    Raises UserError if it is larger than MAX_BYTES.
    """
    version = source_version(root)
    if (root / RECORD_NAME).is_file():
        names = [str(path.relative_to(root)) for path in root.rglob("*") if path.suffix != ".pyc"]
    else:
        names = list_files("--cached", "--others", root=root) or []
        names += [str(path.relative_to(root)) for path in root.glob(EXTENSIONS)]
    if version is None or not names:
        return None
    # git lists deleted files, and modules as folders.
    paths = {name: root / name for name in names if (root / name).is_file()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__, default="")
    if total > MAX_BYTES:
        raise UserError(
            f"the code to copy for the job has {total / 1e6:.0f} MB; its largest file is {largest}",
            where="launch.snapshot",
            allowed=f"at most {MAX_BYTES / 1e6:.0f} MB",
            next_step="move data out of the code folders or add it to .gitignore, or set "
            "launch.snapshot=false to run the code on disk",
        )
    code = {
        name: (path.read_bytes(), 0o555 if os.access(path, os.X_OK) else 0o444)
        for name, path in paths.items()
    }
    return code | {RECORD_NAME: (json_text(asdict(version)).encode(), 0o444)}


def folder_name(code: Code) -> str:
    """Name of the snapshot's folder, from all paths, modes and contents."""
    digest = blake3.blake3()
    for path, (content, mode) in sorted(code.items()):
        digest.update(f"{path}\0{mode}\0{len(content)}\0".encode())
        digest.update(content)
    return f"code-{digest.hexdigest()[:12]}"


def store_code(code: Code, folder: Path) -> Path:
    """Write a snapshot into `folder`, or find the one of an equal submission. Returns its path.

    Raises UserError if it cannot be written.
    """
    final = folder / folder_name(code)
    temporary = folder / f".{final.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        if not final.exists():
            temporary.mkdir(mode=0o700)
            for name, (content, mode) in code.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # Without fsync, which would take seconds.
                path.write_bytes(content)
                path.chmod(mode)
            commit_folder(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # Another submission may have been faster.
        if not final.exists():
            raise UserError(
                f"cannot write the snapshot of the code into {folder}: {error.strerror}",
                where="launch.snapshot",
                next_step="free space, or set launch.snapshot=false to run the code on disk",
            ) from error
    return final
