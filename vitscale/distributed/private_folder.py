"""Keep files of this node where no other user can write."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from vitscale.config.errors import UserError


def private_folder() -> Path:
    """Create `vitscale-UID` in the node's folder of temporary files, with mode 0700.

    Raises UserError if another user owns it or can write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"vitscale-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            "is not a folder that only you can use",
            where=str(folder),
            next_step="remove it, or set TMPDIR to another folder",
        )
    return folder
