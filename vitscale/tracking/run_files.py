"""Read files of a run folder that somebody else may have made.

A link may lead to a private file of the reader, whose content a page or a server would then show; a
named pipe, a device or a huge file never ends.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import Say
from vitscale.tracking.journal import JOURNAL_NAME

MIB = 1 << 20
# Files that say what a run is, and the most bytes that each may have. All are read as texts.
RECORDS = {
    "config.yaml": MIB,
    JOURNAL_NAME: 1024 * MIB,
    "events/*.jsonl": 64 * MIB,
    "classes.json": 64 * MIB,
    "results.json": 64 * MIB,
    ".lock": MIB,
    "*/config-*.yaml": MIB,
    "slurm/*/*.failed_starts": MIB,
}
HARD_LINK = "has a second name (a hard link)"


def check_records(folder: Path) -> None:
    """Raise UserError for a record that is not a file of this run folder, or cannot be read."""
    for pattern, max_bytes in RECORDS.items():
        for path in _matching(folder, pattern):
            reason = why_unsafe(path, folder=folder, max_bytes=max_bytes)
            if reason is None:
                continue
            # Backups share the files of their owner, who may read them anyway.
            if reason == HARD_LINK and path.stat().st_uid == folder.stat().st_uid:
                continue
            raise UserError(
                reason,
                where=path,
                allowed="a file of its own in the run folder",
                next_step="leave this run out, or ask who made it",
            )


def safe_files(
    folder: Path, patterns: Sequence[str], *, max_bytes: int, say: Say
) -> Iterator[Path]:
    """Yield the files of a run folder that match, in order; say which ones are left out."""
    for pattern in patterns:
        for path in _matching(folder, pattern):
            # Folders that match are no files; a link to a folder is named as unsafe.
            if path.is_dir() and not path.is_symlink():
                continue
            reason = why_unsafe(path, folder=folder, max_bytes=max_bytes)
            if reason is None:
                yield path
            else:
                say(f"left out: {path}: {reason}")


def _matching(folder: Path, pattern: str) -> list[Path]:
    """What matches, links that lead nowhere included."""
    if "*" in pattern:
        return sorted(folder.glob(pattern))
    path = folder / pattern
    if os.path.lexists(path):
        return [path]
    return []


def why_unsafe(path: Path, *, folder: Path, max_bytes: int) -> str | None:
    """Say why a file is not to be read; None for a small file of this run folder alone."""
    try:
        # Resolved, since one of the folders above may be a link as well.
        is_inside = path.resolve().is_relative_to(folder.resolve())
        status = path.stat()
    # Links in a circle raise RuntimeError.
    except (OSError, RuntimeError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    if not is_inside:
        return "is a link that leads out of the run folder"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_nlink > 1:
        return HARD_LINK
    if status.st_size > max_bytes:
        return f"has {status.st_size:,} bytes; at most {max_bytes:,} are read"
    return None
