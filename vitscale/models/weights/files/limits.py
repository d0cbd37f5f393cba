"""How large files of weights may be."""

from __future__ import annotations

from pathlib import Path

from vitscale.config.errors import UserError

# G/14, the largest published, has 7.4 GB in fp32.
MAX_BYTES = 16 * 2**30


def check_size(path: Path) -> int:
    """The file's size in bytes. Raises UserError above the limit, and OSError."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"is larger than {MAX_BYTES:,} bytes", where=str(path))
    return size
