"""The classes that a head is cut down to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest

MAX_BYTES = 16 * 2**20


def named_classes(where: str) -> tuple[str, ...]:
    """Class names in label order: of a shard folder, or of a text file with one name per line.

    Raises UserError where there are none, and for names that occur twice.
    """
    path = Path(where)
    if not path.is_file():
        names = read_manifest(where).classes
    elif path.stat().st_size > MAX_BYTES:
        raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=f"head_classes={where}")
    else:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names = tuple(line.strip() for line in lines if line.strip())
    if not names or len(set(names)) < len(names):
        what = "names no classes" if not names else "names a class twice"
        raise UserError(what, where=f"head_classes={where}")
    return names


def sliced_text(num_wanted: int, missing: Sequence[str]) -> str:
    """What was kept of a head, in a sentence."""
    kept = f"kept {num_wanted - len(missing):,} of {num_wanted:,} classes of the head, by name"
    if not missing:
        return kept
    shown = f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
    return f"{kept}; zero weights for {shown}"
