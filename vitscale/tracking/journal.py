"""Write and read the journal: every metric of a run, one JSON object per line.

Owns: writing, truncating to a resumed step, and reading `journal.jsonl`. The journal is the source
of truth; MLflow is filled from it and can always be filled again.
Leaves out: MLflow (`mlflow_sync`).

A line: {"step": 120, "time": 1763700000.25, "train/loss": 1.25}. JSON has no NaN, so values that
are not finite are the strings "NaN", "Infinity", "-Infinity": float() in Python and Number() in
JavaScript read them back.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.distributed.atomic_files import atomic_file

JOURNAL_NAME = "journal.jsonl"
RESERVED_KEYS = ("step", "time")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line: metrics of one step. `time` is unix seconds."""

    step: int
    time: float
    metrics: dict[str, float]


def encode(row: Row) -> bytes:
    """One line of JSON, with its newline."""
    values: dict[str, Any] = {"step": row.step, "time": round(row.time, 3)}
    for key, value in row.metrics.items():
        assert key not in RESERVED_KEYS, key
        values[key] = value if math.isfinite(value) else _not_finite(value)
    return (json.dumps(values, allow_nan=False) + "\n").encode()


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode(line: bytes) -> Row | None:
    """The row of one line; None for a truncated or invalid line."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
        step, moment = values.pop("step"), values.pop("time")
        if type(step) is not int:
            return None
        metrics = {str(key): float(value) for key, value in values.items()}
        return Row(step=step, time=float(moment), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_rows(path: Path | str, *, offset: int = 0) -> Iterator[tuple[Row, int]]:
    """Yield (row, offset of the next line) from `offset` on. Skips unreadable lines."""
    with open(path, "rb") as file:
        file.seek(offset)
        while (line := file.readline()).endswith(b"\n"):
            offset += len(line)
            row = decode(line)
            if row is not None:
                yield row, offset


class Journal:
    """The open journal of a run. Opening it drops the lines after `resume_step`."""

    refused: OSError | None = None
    """Why the last line is not on the disk yet."""

    def __init__(self, path: Path | str, *, resume_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        self.num_dropped = _truncate(self.path, resume_step) if self.path.exists() else 0
        # Keys of the last step: an evaluation repeated after a resume is not written twice.
        self._step, self._keys = -1, set[str]()
        if self.path.exists():
            for row, _ in read_rows(self.path):
                self._remember(row.step, set(row.metrics))
        self._file = open(self.path, "ab", buffering=0)
        self._unwritten = bytearray()
        """Lines, or the rest of one, that a full or failing disk has refused."""

    def _remember(self, step: int, keys: set[str]) -> None:
        if step != self._step:
            self._step, self._keys = step, set()
        self._keys |= keys

    def append(self, metrics: dict[str, float], *, step: int) -> Row | None:
        """Write one line. Returns None if this step already has all these keys.

        What the disk refuses is kept, and written with the next line: see `refused`.
        """
        assert step >= self._step, f"step {step} logged after step {self._step}"
        if step == self._step:
            metrics = {key: value for key, value in metrics.items() if key not in self._keys}
        if not metrics:
            return None
        values = {key: float(value) for key, value in metrics.items()}
        row = Row(step=step, time=time.time(), metrics=values)
        self._unwritten += encode(row)
        self._write()
        self._remember(step, set(values))
        return row

    def _write(self) -> None:
        self.refused = None
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            self.refused = error

    def close(self) -> None:
        """Write what is left. Raises OSError when that cannot be."""
        if self._file.closed:
            return
        self._write()
        try:
            if self.refused is not None:
                raise self.refused
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _truncate(path: Path, resume_step: int) -> int:
    """Keep readable lines up to `resume_step` unchanged. Returns the number of dropped lines.

    The file is replaced atomically, and only if lines are dropped: a kill leaves the old file.
    """
    with open(path, "rb") as file:
        lines = file.readlines()
    rows = [(line, decode(line)) for line in lines]
    kept = [line for line, row in rows if row is not None and row.step <= resume_step]
    if len(kept) < len(lines):
        with atomic_file(path) as file:
            file.writelines(kept)
    return len(lines) - len(kept)
