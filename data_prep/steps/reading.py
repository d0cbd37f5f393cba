"""Read and check the inputs of planned rows."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from data_prep.images.check import MAX_FILE_BYTES, CheckedImage, check_image
from data_prep.sources.errors import ChangedSource, SpoolError, raise_if_outage
from data_prep.sources.protocol import source_root
from data_prep.steps.work import WorkFolder


class InputReader:
    """Reads inputs from the source or from the spool."""

    def __init__(self, work: WorkFolder) -> None:
        self.images = work.run.images
        self.source = os.fsencode(source_root(work.run.source))
        self.spool = os.fsencode(work.path / "spool")

    def check(self, row: Mapping[str, Any]) -> CheckedImage:
        """Check one input. Its hash is empty if its bytes were not read.

        row: `path`, `file`, `offset`, `num_bytes`, `modified_ns` and `spooled`. Raises
        ChangedSource if the source has changed since it was listed, Outage, SpoolError.
        """
        if row["num_bytes"] > MAX_FILE_BYTES:
            return CheckedImage("too_large", b"")
        try:
            data = self._read(row)
        except OSError as error:
            if row["spooled"]:
                raise SpoolError(error) from None
            if isinstance(error, FileNotFoundError):
                raise ChangedSource(os.fsdecode(row["file"] or row["path"])) from None
            raise_if_outage(error, os.fsdecode(row["path"]))
            return CheckedImage("unreadable", b"")
        return check_image(data, settings=self.images)

    def _read(self, row: Mapping[str, Any]) -> bytes:
        # System calls: pathlib and file objects would take as long as the reading.
        folder, name = self.spool if row["spooled"] else self.source, row["file"] or row["path"]
        file = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            is_same = status.st_mtime_ns == row["modified_ns"] and (
                bool(row["file"]) or status.st_size == row["num_bytes"]
            )
            if is_same or row["spooled"]:
                data = _read_range(file, row["offset"], row["num_bytes"])
                if len(data) == row["num_bytes"]:
                    return data
        finally:
            os.close(file)
        if row["spooled"]:
            raise OSError(errno.EIO, "too short")
        raise ChangedSource(os.fsdecode(name))


def _read_range(file: int, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range; fewer if the file is too short."""
    data = os.pread(file, num_bytes, offset)
    while data and len(data) < num_bytes:
        more = os.pread(file, num_bytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
