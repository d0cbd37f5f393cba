"""Golden files: what the product made when they were last renewed, and must make again.

`pytest --renew-golden TESTS` writes them anew; the difference is read before it is committed.
All of them together stay under 1 MB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Golden:
    """The golden files, compared with what a test found or, with --renew-golden, written anew."""

    renew: bool

    def text(self, name: str, found: str) -> None:
        """Compare a text file."""
        if self.renew:
            self._write(name, found)
        assert found == (FOLDER / name).read_text()

    def json(self, name: str, found: Any, *, rel: float = 0.0) -> None:
        """Compare JSON values; numbers that are no integers may differ by `rel`."""
        if self.renew:
            self._write(name, json.dumps(found, indent=1) + "\n")
        expected = json.loads((FOLDER / name).read_text())
        found = json.loads(json.dumps(found))
        changed = differences(found, expected, rel=rel)
        assert not changed, "\n".join(changed)

    def folder(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a golden folder or file; `make` writes it when golden files are renewed."""
        path = FOLDER / name
        if self.renew:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
        return path

    @staticmethod
    def _write(name: str, text: str) -> None:
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def differences(found: Any, expected: Any, *, rel: float, place: str = "") -> list[str]:
    """List the places in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        lines = [f"{place}/{key}: missing" for key in expected if key not in found]
        lines += [f"{place}/{key}: unexpected" for key in found if key not in expected]
        for key in [key for key in expected if key in found]:
            lines += differences(found[key], expected[key], rel=rel, place=f"{place}/{key}")
        return lines
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [
            line
            for row, (one, other) in pairs
            for line in differences(one, other, rel=rel, place=f"{place}/{row}")
        ]
    if isinstance(found, float) and isinstance(expected, float) and rel:
        equal = found == pytest.approx(expected, rel=rel, nan_ok=True)
    else:
        equal = found == expected
    return [] if equal else [f"{place}: {found!r}, expected {expected!r}"]
