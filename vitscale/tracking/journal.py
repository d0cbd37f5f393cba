"""Write and read `journal.jsonl`, every metric of a run as JSON, and print lines of progress.

The journal is the source of truth: stores are filled from it, and can always be filled again.
A line: {"step": 120, "time": 1763700000.25, "train/loss": 1.25}. JSON has no NaN, so values that
are not finite are the strings "NaN", "Infinity", "-Infinity": float() in Python and Number() in
JavaScript read them back.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from vitscale.distributed.atomic_files import Say, fsync_folder, open_log, write_bytes

JOURNAL_NAME = "journal.jsonl"
LOG_NAME = "logs/rank0.log"
CLOCK_FORMAT = "%Y-%m-%d %H:%M:%S"
ITEM_INTERVAL_S = 5.0
# Beyond these a line is not ours: stores have 64 bits for a step, and times are of years to 5138.
MAX_LINE_BYTES = 1 << 20
MAX_STEP = (1 << 63) - 1
MAX_TIME_S = 1e11


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line: metrics of one step. `time` is unix seconds."""

    step: int
    time: float
    metrics: dict[str, float]


def encode(row: Row) -> bytes:
    """One line of JSON, with its newline."""
    # Metrics share the line with these two keys.
    assert not row.metrics.keys() & {"step", "time"}
    values: dict[str, Any] = {"step": row.step, "time": round(row.time, 3)}
    for key, value in row.metrics.items():
        values[key] = value if math.isfinite(value) else json.dumps(value)
    return (json.dumps(values, allow_nan=False) + "\n").encode()


def decode(line: bytes) -> Row | None:
    """The row of one line; None for a truncated or invalid line."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
        step = values.pop("step")
        moment = float(values.pop("time"))
        metrics = {str(key): float(value) for key, value in values.items()}
    # The last two stand for numbers beyond a float's range, and for lists in lists in lists.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None

    # `type` and not `isinstance`: true and false are integers, too.
    if type(step) is not int or abs(step) > MAX_STEP or not 0 <= moment < MAX_TIME_S:
        return None
    return Row(step=step, time=moment, metrics=metrics)


def read_rows(path: Path, *, offset: int = 0) -> Iterator[tuple[Row, int]]:
    """Yield (row, offset of the next line) from `offset` on. Skips unreadable lines."""
    with open(path, "rb") as file:
        file.seek(offset)
        is_rest = False
        while line := file.readline(MAX_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < MAX_LINE_BYTES:
                # It is being written.
                return
            offset += len(line)

            # The rest of a line that is too long may look like a row.
            row = None
            if is_whole and not is_rest:
                row = decode(line)
            is_rest = not is_whole
            if row is not None:
                yield row, offset


class Journal:
    """The open journal of a run. Opening it drops the lines after `resume_step`."""

    refused: OSError | None = None
    """Why the last line is not on the disk yet."""
    last_step = 0
    """Of the line before those of this start."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)

        if self.path.exists():
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = []
            for line in lines:
                row = decode(line)
                if row is not None and row.step <= resume_step:
                    kept.append(line)
                    self.last_step = row.step
            # Written atomically, so that a kill leaves the old file.
            if len(kept) < len(lines):
                write_bytes(self.path, b"".join(kept))

        self._file = open(self.path, "ab", buffering=0)
        # The name of the file must survive power loss, too.
        fsync_folder(self.path.parent)
        # Lines, or the rest of one, that a full or failing disk has refused.
        self._unwritten = bytearray()

    def append(self, metrics: dict[str, float], *, step: int) -> None:
        """Write one line. What the disk refuses is kept, and written with the next: `refused`."""
        values = {key: float(value) for key, value in metrics.items()}
        if values:
            self._unwritten += encode(Row(step=step, time=time.time(), metrics=values))
            self._write()

    def _write(self) -> None:
        self.refused = None
        try:
            while self._unwritten:
                # A disk may take a part of what it is given.
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            self.refused = error

    def flush(self) -> None:
        """Let the written lines survive power loss. Any thread may call it.

        Raises OSError, also where the disk has refused lines, which only this process has.
        """
        # Read before the fsync: another thread may append in the meantime.
        refused = self.refused
        # A closed file raises ValueError, and was flushed when it was closed.
        with suppress(ValueError):
            try:
                os.fsync(self._file.fileno())
                if refused is not None:
                    raise refused
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Write what is left. Raises OSError when that cannot be. A second call does nothing."""
        if self._file.closed:
            return
        with self._file:
            self._write()
            if self.refused is not None:
                raise self.refused
            os.fsync(self._file.fileno())


# ---- progress, as plain lines: the same on a terminal and in a log ------------------------------


def format_duration(seconds: float) -> str:
    """Hours:minutes:seconds, rounded to seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def training_log(folder: Path, *, is_writer: bool) -> Iterator[Say]:
    """Yield a function that prints a line after the clock time and appends it to LOG_NAME.

    On other ranks it does nothing. After the block it prints alone.
    """
    if not is_writer:
        yield lambda text: None
        return
    path = folder / LOG_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_log(path) as log:

        def say(text: str) -> None:
            line = f"{time.strftime(CLOCK_FORMAT)} {text}"
            print(line, flush=True)
            if not log.closed:
                log.write(line + "\n")

        yield say


@contextmanager
def item_progress(
    title: str,
    *,
    total: int,
    unit: str = "images",
    is_shown: bool = True,
    file: TextIO | None = None,
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the number of items done; print rate and time left.

    A line every ITEM_INTERVAL_S and at the end; none for shorter work.
    is_shown: false on all but the first of several ranks. file: None: standard output.
    """
    start = time.monotonic()
    last_line = start
    done = 0

    def advance(num: int) -> None:
        nonlocal done, last_line
        done = min(done + num, total)
        now = time.monotonic()
        # A first line after ITEM_INTERVAL_S shows that the work is long enough for a last one.
        is_long_work = last_line > start
        is_end = done == total and is_long_work
        if not is_shown or not (is_end or now - last_line >= ITEM_INTERVAL_S):
            return

        last_line = now
        # Neither factor is zero, also right after the start.
        rate = max(done, 1) / max(now - start, 1e-9)
        # A teacher on a CPU may take seconds for an image.
        digits = 0
        if rate < 10:
            digits = 2
        hours, seconds = divmod(round((total - done) / rate), 3600)
        left = f"{seconds:,} s left"
        if hours:
            left = f"{hours:,} h {seconds // 60} min left"
        print(
            f"{title}: {done:,} of {total:,}, {rate:,.{digits}f} {unit}/s, {left}",
            file=file,
            flush=True,
        )

    yield advance
