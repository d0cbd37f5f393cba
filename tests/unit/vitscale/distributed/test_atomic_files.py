"""Files are whole or absent: the order of flushes and renames."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from vitscale.distributed.atomic_files import atomic_file, write_bytes


def test_content_is_flushed_before_the_rename_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other order power loss can leave an empty file, or the old one after a commit."""
    calls: list[tuple[str, Any]] = []
    replace = os.replace

    def record_flush(fd: int) -> None:
        status = os.fstat(fd)
        folder = stat.S_ISDIR(status.st_mode)
        calls.append(("flush folder", None) if folder else ("flush", status.st_size))

    def record_rename(old: Path, new: Path) -> None:
        calls.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_rename)
    write_bytes(tmp_path / "file", bytes(1000))
    assert calls == [("flush", 1000), ("rename", "file"), ("flush folder", None)]


def test_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"old")
    with pytest.raises(KeyError), atomic_file(tmp_path / "file") as file:
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
