"""Copy the submitted code into the job folder, so that later edits do not reach the job.

Owns: which files, and the folder code-HASH, named by its content.
Leaves out: making a job import from it (`submission`), and git (`config.packaged`).

Equal submissions share a snapshot. It contains the files of the code folders as they are on disk,
and a record of the version.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import blake3

from vitscale.config.errors import UserError
from vitscale.config.packaged import (
    CODE_FOLDERS,
    INSIDE,
    PACKAGE,
    PROJECT_ROOT,
    RECORD_NAME,
    source_version,
)
from vitscale.distributed.atomic_files import commit_folder, json_text
from vitscale.runs.launching import LaunchSettings

MAX_FILE_BYTES = 64 << 20
Code = dict[str, bytes]
"""Path below the root -> content, with the record of the version."""


def kept_code(
    launch: LaunchSettings, folder: Path, *, root: Path = PROJECT_ROOT
) -> Path | None:
    """The snapshot of the code in a job folder, written if it is not there yet.

    None if `launch` wants none: then the job runs the code on disk.
    Raises UserError if it cannot be written.
    """
    if not launch.snapshot:
        return None

    code = read_code(root)
    final = folder / folder_name(code)
    temporary = folder / f".{final.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        # It is named by its content and committed by one rename: one that exists is complete.
        if not final.exists():
            temporary.mkdir(mode=0o700)
            for name, content in code.items():
                path = temporary / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # Without fsync, which would take seconds.
                path.write_bytes(content)
                path.chmod(0o444)
            commit_folder(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # Without locks, another submission may have been faster.
        if not final.exists():
            raise UserError(
                f"cannot write the snapshot of the code into {folder}: {error.strerror}",
                where="launch.snapshot",
                next_step="free space, or set launch.snapshot=false to run the code on disk",
            ) from error
    return final


def read_code(root: Path = PROJECT_ROOT) -> Code:
    """Read the code that jobs run, a wheel's as it lies in a checkout.

    Raises UserError for a file that is too large for code, such as weights among configurations.
    """
    folders = {name: root / name for name in CODE_FOLDERS}
    if root == INSIDE:
        folders["vitscale"] = PACKAGE

    # The checkout lies inside the package of a wheel, so its files are not read twice.
    code = {
        str(name / path.relative_to(folder)): _read(path)
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
        if folder != PACKAGE or not path.is_relative_to(INSIDE)
    }

    # Without a version an empty record: git may know another project around the job folder.
    record = {}
    version = source_version(root)
    if version is not None:
        record = version._asdict()
    return code | {RECORD_NAME: json_text(record).encode()}


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise UserError(
            f"has {size:,} bytes, too many for a copy of the code",
            where=path,
            allowed=f"at most {MAX_FILE_BYTES:,} bytes",
            next_step="move it out of the code, or set launch.snapshot=false",
        )
    return path.read_bytes()


def folder_name(code: Code) -> str:
    """Name of the snapshot's folder, from all paths and contents."""
    digest = blake3.blake3()
    # Lengths keep two files apart from one with both contents.
    for path, content in sorted(code.items()):
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return f"code-{digest.hexdigest()[:12]}"
