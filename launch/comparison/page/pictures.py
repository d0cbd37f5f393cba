"""Find the pictures of runs, so that the same picture of several runs is side by side."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.comparison.runs import RunRecord

PNG_START = b"\x89PNG\r\n\x1a\n"
MAX_PICTURE_BYTES = 2 << 20
MAX_ALL_BYTES = 16 << 20
MAX_NAMES = 24


def pictures(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """{"rows": [{"name", "files": base64 or null by run}], "num_left_out": too large or too many}.

    Written by objectives at the end of a training, by evaluations and by `finetune/visualize.py`.
    """
    folders = [None if run.folder is None else run.folder / "pictures" for run in runs]
    found = [{} if folder is None else {p.name: p for p in _files(folder)} for folder in folders]
    # Pictures that most runs have come first.
    names = sorted({name for each in found for name in each})
    names.sort(key=lambda name: -sum(name in each for each in found))
    rows: list[dict[str, Any]] = []
    bytes_left, num_left_out = MAX_ALL_BYTES, 0
    for name in names:
        files: list[str | None] = []
        for each in found:
            data = _read(each.get(name), limit=min(MAX_PICTURE_BYTES, bytes_left))
            if len(rows) >= MAX_NAMES:
                data = None
            num_left_out += name in each and data is None
            bytes_left -= len(data or b"")
            files.append(None if data is None else base64.b64encode(data).decode())
        if any(files):
            rows.append({"name": Path(name).stem.replace("_", " "), "files": files})
    return {"rows": rows, "num_left_out": num_left_out}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.png") if path.is_file())


def _read(path: Path | None, *, limit: int) -> bytes | None:
    """None for a file that is missing, too large, unreadable or no PNG."""
    if path is None:
        return None
    try:
        if path.stat().st_size > limit:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data if data.startswith(PNG_START) and len(data) <= limit else None
