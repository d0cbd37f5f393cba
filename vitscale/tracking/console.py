"""Show the progress of a training loop: a live bar on terminals, plain lines elsewhere.

Owns: the progress line, its fixed plain format, and `logs/rank0.log`.
Leaves out: metrics (`tracker`).

A plain line: step 120/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 0:01:20
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

LOG_NAME = "logs/rank0.log"


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
    """The fixed format of the log. `data_wait` is a share of the time, 0 to 1."""
    return (
        f"step {step}/{total_steps} loss {loss:.4f} lr {lr:.1e} img/s {images_per_s:.0f} "
        f"wait {data_wait:.0%} eta {format_duration(eta_s)}"
    )


class ProgressLine:
    """Progress of one loop. If not `is_writer`, every call does nothing."""

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int,
        title: str,
        log: TextIO | None,
        live: Progress | None,
        is_writer: bool,
    ) -> None:
        self._total, self._start_step, self._is_writer = total_steps, start_step, is_writer
        self._log, self._live = log, live
        self._start = time.monotonic()
        self._task: Any = None
        if live is not None:
            self._task = live.add_task(title, total=total_steps, completed=start_step, facts="")
            live.start()

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
        log, live = None, None
        if is_writer:
            path = Path(folder) / LOG_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            log = open(path, "a", encoding="utf-8", buffering=1)
            live = _live_progress() if sys.stdout.isatty() else None
        return cls(
            total_steps=total_steps,
            start_step=start_step,
            title=title,
            log=log,
            live=live,
            is_writer=is_writer,
        )

    def advance(self, step: int) -> None:
        """Move the bar to `step`. Cheap enough for every step."""
        if self._live is not None:
            self._live.update(self._task, completed=step)

    def update(
        self, step: int, *, loss: float, lr: float, images_per_s: float, data_wait: float = 0.0
    ) -> None:
        """Write a plain line, or show these metrics beside the bar."""
        if not self._is_writer:
            return
        done = step - self._start_step
        elapsed = time.monotonic() - self._start
        line = plain_line(
            step=step,
            total_steps=self._total,
            loss=loss,
            lr=lr,
            images_per_s=images_per_s,
            data_wait=data_wait,
            eta_s=elapsed / done * (self._total - step) if done > 0 else 0.0,
        )
        self._write_log(line)
        if self._live is None:
            print(line, flush=True)
        else:
            facts = line.split(" ", 2)[2]  # the bar shows the step
            self._live.update(self._task, completed=step, facts=facts)

    def message(self, text: str) -> None:
        """Print a message above the live line."""
        if not self._is_writer:
            return
        self._write_log(text)
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def _write_log(self, text: str) -> None:
        if self._log is not None and not self._log.closed:
            self._log.write(text + "\n")

    def close(self) -> None:
        """Restore the terminal. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
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


def _live_progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        refresh_per_second=4,
    )
