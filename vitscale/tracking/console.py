"""Print progress as plain lines, the same on a terminal and in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vitscale.distributed.atomic_files import open_log

LOG_NAME = "logs/rank0.log"
CLOCK_FORMAT = "%Y-%m-%d %H:%M:%S"
ITEM_INTERVAL_S = 5.0


def format_duration(seconds: float) -> str:
    """Hours:minutes:seconds, rounded to seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def training_log(folder: str | Path, *, is_writer: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line after the clock time and appends it to LOG_NAME.

    On other ranks it does nothing. After the block it prints alone.
    """
    if not is_writer:
        yield lambda text: None
        return
    path = Path(folder) / LOG_NAME
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
    title: str, *, total: int, unit: str = "images"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds to the number of items done; print rate and time left.

    A line every ITEM_INTERVAL_S and at the end; none for shorter work.
    """
    start = last = time.monotonic()
    done = 0

    def advance(num: int) -> None:
        nonlocal done, last
        done, now = min(done + num, total), time.monotonic()
        if now - last >= ITEM_INTERVAL_S or (done == total and last > start):
            last, rate = now, max(done, 1) / max(now - start, 1e-9)
            left = f"{(total - done) / rate:,.0f} s left"
            print(f"{title}: {done:,} of {total:,}, {rate:,.0f} {unit}/s, {left}", flush=True)

    yield advance
