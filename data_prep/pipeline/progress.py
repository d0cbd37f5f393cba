"""How far a long step has come: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PLAIN_INTERVAL_S = 5.0
# On a terminal nothing is said about shorter steps.
SHORT_S = 1.0


class Progress:
    """Shows a count of images, or of something else, that grows to `total`."""

    def __init__(self, title: str, *, total: int, unit: str = "images") -> None:
        self._title, self._total, self._unit = title, total, unit
        self._start = self._last = time.monotonic()
        self._first = self._done = 0
        self._bar: Any = _bar() if sys.stdout.isatty() else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, rate="")

    def update(self, done: int) -> None:
        """`done` images in all; what the first call finds was done before."""
        self._first = self._first or done
        self._done = max(self._done, min(done, self._total))
        now = time.monotonic()
        if self._bar is not None:
            rate = f"{self._rate(now):,.0f} {self._unit}/s"
            self._bar.update(self._task, completed=self._done, rate=rate)
        elif now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            self._print(now)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last > self._start:
            self._print(time.monotonic())

    def _rate(self, now: float) -> float:
        return (self._done - self._first) / max(now - self._start, 1e-9)

    def _print(self, now: float) -> None:
        rate = self._rate(now)
        left = (self._total - self._done) / rate if rate else 0.0
        print(
            f"{self._title}: {self._done:,} of {self._total:,}, {rate:,.0f} {self._unit}/s, "
            f"{left:,.0f} s left",
            flush=True,
        )


class Elapsed:
    """Shows that a step goes on whose end nobody can tell: a note, and the time since it began."""

    def __init__(self, title: str) -> None:
        self._title, self._note = title, ""
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, note: str = "") -> None:
        self._note = note
        now = time.monotonic()
        if not sys.stdout.isatty():
            if now - self._last >= PLAIN_INTERVAL_S:
                self._last = now
                self._print(now)
        elif self._bar is not None:
            self._bar.update(self._task, note=note)
        elif now - self._start >= SHORT_S:
            self._bar = _clock()
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, note=note)

    def close(self, note: str = "") -> None:
        self._note = note
        if self._bar is not None:
            self._bar.update(self._task, note=note)
            self._bar.stop()
        elif self._last > self._start:
            self._print(time.monotonic())

    def _print(self, now: float) -> None:
        facts = [self._note] if self._note else []
        print(f"{self._title}: {', '.join([*facts, f'{now - self._start:,.0f} s'])}", flush=True)


@contextmanager
def progress(title: str, *, total: int, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of further images done."""
    line = Progress(title, total=total, unit=unit)
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        line.update(done)

    try:
        yield advance
    finally:
        line.close()


def _clock() -> Any:
    from rich.progress import Progress as RichProgress
    from rich.progress import TextColumn, TimeElapsedColumn

    return RichProgress(
        TextColumn("{task.description}"), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    )


def _bar() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
