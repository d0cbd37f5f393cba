"""Show progress as plain lines, the same on a terminal and in a log.

Owns: lines of a training (with `logs/rank0.log`) and of a count of items.
Leaves out: metrics (`tracker`).

A line of training, after the clock time:
step 120/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 0:01:20
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vitscale.distributed.retry import open_log

LOG_NAME = "logs/rank0.log"
CLOCK_FORMAT = "%Y-%m-%d %H:%M:%S"
ITEM_INTERVAL_S = 5.0


def format_duration(seconds: float) -> str:
    """Hours:minutes:seconds, rounded to seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


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
    """The line of a training step. `data_wait` is a fraction of the time, 0 to 1."""
    return (
        f"step {step}/{total_steps} loss {loss:.4f} lr {lr:.1e} img/s {images_per_s:.0f} "
        f"wait {data_wait:.0%} eta {format_duration(eta_s)}"
    )


class Console:
    """Lines of a training, printed and appended to its log. Silent on other ranks."""

    def __init__(self, folder: str | Path, *, is_writer: bool) -> None:
        self._log: TextIO | None = None
        if is_writer:
            path = Path(folder) / LOG_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open_log(path)

    def message(self, text: str) -> None:
        """Write a sentence after the clock time."""
        if self._log is not None:
            line = f"{time.strftime(CLOCK_FORMAT)} {text}"
            print(line, flush=True)
            if not self._log.closed:
                self._log.write(line + "\n")

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()


@contextmanager
def item_progress(
    title: str, *, total: int, unit: str = "images"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the number of items done; print rate and time left.

    A line every ITEM_INTERVAL_S and at the end; none for shorter work.
    """
    start = last = time.monotonic()
    done = 0

    def show() -> None:
        rate = max(done, 1) / max(time.monotonic() - start, 1e-9)
        left = f"{(total - done) / rate:,.0f} s left"
        print(f"{title}: {done:,} of {total:,}, {rate:,.0f} {unit}/s, {left}", flush=True)

    def advance(num: int) -> None:
        nonlocal done, last
        done = min(done + num, total)
        if time.monotonic() - last >= ITEM_INTERVAL_S:
            last = time.monotonic()
            show()

    try:
        yield advance
    finally:
        if last > start:
            show()
