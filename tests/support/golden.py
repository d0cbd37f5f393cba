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


@dataclass
class Golden:
    """The golden files, compared with what a test made or, with --renew-golden, written anew."""

    renew: bool

    def text(self, name: str, made: str):
        if self.renew:
            self._write(name, made)
        assert made == (FOLDER / name).read_text()

    def json(self, name: str, made, *, rel: float = 0.0):
        """Compare JSON values; numbers that are no integers may differ by `rel`."""
        text = json.dumps(made, indent=1) + "\n"
        if self.renew:
            self._write(name, text)
        expected = json.loads((FOLDER / name).read_text())
        # Through JSON as the file went: tuples become lists, and numbers that are keys text.
        changed = differences(json.loads(text), expected, rel=rel)
        # All lines at once: the first alone would not show what kind of change it is.
        assert not changed, "\n".join(changed)

    def folder(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a golden folder or file; `make` writes it when golden files are renewed."""
        path = FOLDER / name
        if self.renew:
            # What the new version does not write must not stay.
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
        return path

    @staticmethod
    def _write(name: str, text: str):
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def differences(made, expected, *, rel: float) -> list[str]:
    ours = dict(_leaves(made))
    theirs = dict(_leaves(expected))
    lines = []
    for path in theirs | ours:
        one = ours.get(path, "missing")
        other = theirs.get(path, "missing")
        allowed = other
        # Counts and steps must be equal; only sums of floats differ between processors.
        if rel and isinstance(one, float) and isinstance(other, float):
            allowed = pytest.approx(other, rel=rel, nan_ok=True)
        if one != allowed:
            lines.append(f"{path}: {one!r}, expected {other!r}")
    return lines


def _leaves(value, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that holds no others, with its path."""
    # An empty one is a value: otherwise it could not be told from a missing one.
    if value and isinstance(value, list):
        value = dict(enumerate(value))
    if value and isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}")
    else:
        yield path, value
