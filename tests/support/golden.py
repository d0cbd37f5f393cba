"""Golden files: what the product made when they were last renewed, and must make again.

`pytest --renew-golden TESTS` writes them anew; the difference is read before it is committed.
All of them together stay under 1 MB.
"""

import json
import shutil
from collections.abc import Callable, Iterator
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
        if self.renew:
            self._write(name, found)
        assert found == (FOLDER / name).read_text()

    def json(self, name: str, found, *, rel: float = 0.0) -> None:
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


def differences(found, expected, *, rel: float) -> list[str]:
    ours = dict(_leaves(found))
    theirs = dict(_leaves(expected))
    lines = []
    for place in theirs | ours:
        one, other = (each.get(place, "missing") for each in (ours, theirs))
        is_near = rel and isinstance(one, float) and isinstance(other, float)
        wanted = pytest.approx(other, rel=rel, nan_ok=True) if is_near else other
        lines += [] if one == wanted else [f"{place}: {one!r}, expected {other!r}"]
    return lines


def _leaves(value, place: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that holds no others, with its place."""
    if value and isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{place}/{key}")
    else:
        yield place, value
