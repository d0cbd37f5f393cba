"""Show progress: a live line on a terminal, plain lines in a log.

Owns: progress of a training loop (with `logs/rank0.log`), of a count of items, and of a step
without a known end; the plain format of each.
Leaves out: metrics (`tracker`).

A plain line of training, after the clock time:
step 120/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 0:01:20
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vitscale.distributed.failures.storage import open_log

LOG_NAME = "logs/rank0.log"
CLOCK_FORMAT = "%Y-%m-%d %H:%M:%S"
PLAIN_INTERVAL_S = 5.0
# On a terminal, a step of unknown length is not shown before.
SHORT_S = 1.0


def format_duration(seconds: float) -> str:
    """Hours:minutes:seconds, rounded to seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class LiveLine:
    """A line that a terminal updates in place; without a terminal, `update` shows nothing."""

    def __init__(self, title: str, *, total: int | None = None, completed: int = 0) -> None:
        """total: of the bar; None: no bar."""
        self._live: Any = None
        self.is_live = sys.stdout.isatty()
        if not self.is_live:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        bar = () if total is None else (BarColumn(), MofNCompleteColumn())
        columns = TextColumn("{task.description}"), *bar, TextColumn("{task.fields[facts]}")
        self._live = Progress(*columns, refresh_per_second=4)
        self._task = self._live.add_task(title, total=total, completed=completed, facts="")
        self._live.start()

    def update(self, **changes: Any) -> None:
        """changes: `completed`, `facts` (text beside the bar)."""
        if self._live is not None:
            self._live.update(self._task, **changes)

    def print(self, text: str) -> None:
        """Print a plain line, above the live line if there is one."""
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Restore the terminal. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def plain_line(
    *,
    step: int,
    total_steps: int,
    loss: float,
    lr: float,
    images_per_s: float,
    data_wait: float,
    eta_s: float,
) -> str:
    """The log's line of a training step. `data_wait` is a fraction of the time, 0 to 1."""
    return (
        f"step {step}/{total_steps} loss {loss:.4f} lr {lr:.1e} img/s {images_per_s:.0f} "
        f"wait {data_wait:.0%} eta {format_duration(eta_s)}"
    )


class ProgressLine:
    """Progress of a training loop. If not `is_writer`, every call does nothing."""

    def __init__(
        self, *, total_steps: int, start_step: int, live: LiveLine | None, log: TextIO | None
    ) -> None:
        self._total, self._start_step = total_steps, start_step
        self._live, self._log = live, log
        self._start = time.monotonic()
        self._after_first: tuple[int, float] | None = None

    @classmethod
    def open(
        cls,
        *,
        folder: str | Path,
        total_steps: int,
        start_step: int = 0,
        title: str = "train",
        is_writer: bool,
    ) -> ProgressLine:
        """Append plain lines to `folder`/logs/rank0.log; without a terminal, print them too."""
        live, log = None, None
        if is_writer:
            path = Path(folder) / LOG_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open_log(path)
            live = LiveLine(title, total=total_steps, completed=start_step)
        return cls(total_steps=total_steps, start_step=start_step, live=live, log=log)

    def advance(self, step: int) -> None:
        """Move the bar to `step`. Cheap enough for every step."""
        if self._live is not None:
            self._live.update(completed=step)
            if self._after_first is None:
                # The first step compiles, and warms caches and workers.
                self._after_first = step, time.monotonic()

    def update(
        self, step: int, *, loss: float, lr: float, images_per_s: float, data_wait: float = 0.0
    ) -> None:
        """Log a plain line at the end of an interval; on a terminal, show its metrics."""
        if self._live is None:
            return
        first, since = self._after_first or (self._start_step, self._start)
        if step <= first:
            first, since = self._start_step, self._start
        done, elapsed = step - first, time.monotonic() - since
        line = plain_line(
            step=step,
            total_steps=self._total,
            loss=loss,
            lr=lr,
            images_per_s=images_per_s,
            data_wait=data_wait,
            eta_s=elapsed / done * (self._total - step) if done > 0 else 0.0,
        )
        if self._live.is_live:
            self._write_log(line)
            facts = line.split(" ", 2)[2]  # the bar itself shows the step
            self._live.update(completed=step, facts=facts)
        else:
            self._live.print(self._write_log(line))

    def message(self, text: str) -> None:
        """Log and print a sentence."""
        if self._live is not None:
            line = self._write_log(text)
            self._live.print(text if self._live.is_live else line)

    def _write_log(self, text: str) -> str:
        """Write a line with its clock time. Returns the line."""
        line = f"{time.strftime(CLOCK_FORMAT)} {text}"
        if self._log is not None and not self._log.closed:
            self._log.write(line + "\n")
        return line

    def close(self) -> None:
        """Restore the terminal and close the log. A second call does nothing."""
        if self._live is not None:
            self._live.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ItemProgress:
    """Progress of a count of items that grows to `total`, with rate and time left."""

    def __init__(self, title: str, *, total: int, unit: str = "images") -> None:
        self._title, self._total, self._unit = title, total, unit
        self._start = self._last = time.monotonic()
        self._first = self._done = 0
        self._live = LiveLine(title, total=total)

    def update(self, done: int) -> None:
        """done: items in total. Those of the first call do not count for the rate."""
        self._first = self._first or done
        self._done = max(self._done, min(done, self._total))
        now = time.monotonic()
        if self._live.is_live:
            self._live.update(completed=self._done, facts=self._facts(now))
        elif now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            self._print(now)

    def close(self) -> None:
        self._live.close()
        if self._last > self._start:
            self._print(time.monotonic())

    def _facts(self, now: float) -> str:
        rate = (self._done - self._first) / max(now - self._start, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        return f"{rate:,.0f} {self._unit}/s, {left:,.0f} s left"

    def _print(self, now: float) -> None:
        done = f"{self._done:,} of {self._total:,}"
        self._live.print(f"{self._title}: {done}, {self._facts(now)}")


class ElapsedProgress:
    """Progress of a step without a known end: a note, and the time since it began."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._last = time.monotonic()
        self._live: LiveLine | None = None

    def update(self, note: str = "") -> None:
        now = time.monotonic()
        if not sys.stdout.isatty():
            if now - self._last >= PLAIN_INTERVAL_S:
                self._last = now
                self._print(note, now)
        elif now - self._start >= SHORT_S:
            self._live = self._live or LiveLine(self._title)
            self._live.update(facts=self._facts(note, now))

    def close(self, note: str = "") -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(facts=self._facts(note, now))
            self._live.close()
        elif self._last > self._start:
            self._print(note, now)

    def _facts(self, note: str, now: float) -> str:
        elapsed = f"{now - self._start:,.0f} s"
        return f"{note}, {elapsed}" if note else elapsed

    def _print(self, note: str, now: float) -> None:
        print(f"{self._title}: {self._facts(note, now)}", flush=True)


@contextmanager
def item_progress(
    title: str, *, total: int, unit: str = "images"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the number of items done."""
    progress = ItemProgress(title, total=total, unit=unit)
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        progress.update(done)

    try:
        yield advance
    finally:
        progress.close()
