"""Read how far a training run is, from its checkpoints, its events and the end of its journal.

Leaves out: whether it still runs (`reading`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vitscale.checkpoint.folders import step_folders, step_of
from vitscale.distributed.failures.events import TrainingStart, read_start
from vitscale.tracking.journal import JOURNAL_NAME, Row, decode

# Holds thousands of lines: the last evaluation is among them.
TAIL_BYTES = 1 << 18
RESULT_PREFIX = "val/"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedProgress:
    """What a run has logged. Times are unix seconds."""

    step: int
    """Of the last line in the journal, or of the newest checkpoint if that is later."""
    checkpoint_step: int
    """0 without a checkpoint."""
    total_steps: int | None
    """None before its first start."""
    eta_s: float | None
    """Seconds left at `time`, at the mean speed since the start; None before the second line."""
    time: float | None
    """Of the last line in the journal."""
    images_per_s: float | None
    mfu: float | None
    """Model FLOP/s utilisation, 0 to 1; None where the device's rate is unknown."""
    loss: float | None
    results: dict[str, float]
    """Last values of the evaluations' metrics, by name."""

    @property
    def is_done(self) -> bool:
        """The last step is saved, which is the last thing that a run does."""
        return self.total_steps is not None and self.checkpoint_step >= self.total_steps


def read_logged(run_folder: Path) -> LoggedProgress:
    """The state of the run's files. Missing files and unreadable lines count as not logged."""
    rows = _rows(tail(run_folder / JOURNAL_NAME))
    last: dict[str, float] = {}
    for row in rows:
        last |= row.metrics
    start = read_start(run_folder)
    saved = next(map(step_of, step_folders(run_folder / "checkpoints")), 0)
    return LoggedProgress(
        step=max(rows[-1].step if rows else 0, saved),
        checkpoint_step=saved,
        total_steps=start.total_steps if start is not None else None,
        eta_s=_seconds_left(rows, start) if start is not None else None,
        time=rows[-1].time if rows else None,
        images_per_s=_named(last, "images_per_s"),
        mfu=_named(last, "mfu"),
        loss=last.get("train/loss"),
        results={key: value for key, value in last.items() if key.startswith(RESULT_PREFIX)},
    )


def log_age(paths: list[Path], *, now: float) -> float | None:
    """Seconds since one of the files was written; None if none exists."""
    times = []
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now - max(times)) if times else None


def tail(path: Path, *, num_bytes: int = TAIL_BYTES) -> list[bytes]:
    """The last whole lines of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.readlines()
    except OSError:
        return []
    return lines[1:] if start else lines


def _rows(lines: list[bytes]) -> list[Row]:
    return [row for row in map(decode, lines) if row is not None]


def _seconds_left(rows: list[Row], start: TrainingStart) -> float | None:
    """At the last line of the journal, by its lines since the start."""
    rows = [row for row in rows if row.time >= start.time]
    done = rows[-1].step - rows[0].step if rows else 0
    if not done:
        return None
    return (rows[-1].time - rows[0].time) / done * (start.total_steps - rows[-1].step)


def _named(metrics: dict[str, float], name: str) -> float | None:
    """The value of a metric by its name without the group."""
    return next((v for key, v in metrics.items() if key.rpartition("/")[2] == name), None)
