"""How far a long pass has come: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_INTERVAL_S = 5.0


@contextmanager
def progress(title: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of further images done."""
    show = _bar if sys.stdout.isatty() else _plain_lines
    with show(title, total) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as display:
        task = display.add_task(title, total=total, rate="")

        def advance(num: int) -> None:
            display.update(task, advance=num)
            speed = display.tasks[0].speed
            display.update(task, rate=f"{speed:,.0f} images/s" if speed else "")

        yield advance


@contextmanager
def _plain_lines(title: str, total: int) -> Iterator[Callable[[int], None]]:
    start = last = time.monotonic()
    done = 0

    def line(now: float) -> None:
        rate = done / max(now - start, 1e-9)
        left = (total - done) / rate if rate else 0.0
        print(
            f"{title}: {done:,} of {total:,}, {rate:,.0f} images/s, {left:,.0f} s left", flush=True
        )

    def advance(num: int) -> None:
        nonlocal done, last
        done += num
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_S or done == total:
            last = now
            line(now)

    yield advance
