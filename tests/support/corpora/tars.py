"""Write small tars."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

Members = dict[str, bytes] | Iterable[tuple[str, bytes]]


def tar_bytes(members: Members, *, format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of plain files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tars(root: Path, tars: dict[str, Members]) -> None:
    for path, members in tars.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(tar_bytes(members))
