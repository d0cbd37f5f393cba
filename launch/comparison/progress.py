"""What a run had spent at each of its logged steps: samples, hours, FLOPs.

Leaves out: metrics (`ComparedRun.series`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from finetune.run import FinetuneRun
from launch.comparison.runs import ComparedRun
from launch.jobs.attempts import read_attempts
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run_file
from vitscale.config.section import Run

RUN_TYPES: dict[str, type[Run]] = {"pretrain": PretrainRun, "finetune": FinetuneRun}
SECONDS_PER_HOUR = 3600.0
AXES = ("steps", "samples", "hours", "flops")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Totals since the run's start, by logged step. What is unknown is None.

    Hours are since the first logged line, without the waits between two attempts where the run
    folder records its attempts. FLOPs are those of the run
    itself: forward and backward passes by formula, without evaluations and without `init`.
    """

    steps: tuple[int, ...]
    """Logged steps, ascending, each once."""
    hours: tuple[float, ...]
    samples: tuple[float, ...] | None
    flops: tuple[float, ...] | None

    def along(self, axis: str) -> tuple[float, ...] | None:
        """The totals of an axis (`AXES`)."""
        return {
            "steps": tuple(float(step) for step in self.steps),
            "samples": self.samples,
            "hours": self.hours,
            "flops": self.flops,
        }[axis]

    def at(self, axis: str, step: int) -> float | None:
        """The total of an axis at the last logged step that is not after `step`."""
        totals = self.along(axis)
        place = bisect_right(self.steps, step) - 1
        return None if totals is None or place < 0 else totals[place]


def progress_of(run: ComparedRun) -> Progress:
    """Steps and hours from the rows, samples from the parameters, FLOPs from config.yaml."""
    times: dict[int, float] = {}
    for row in sorted(run.rows, key=lambda row: row.step):
        times[row.step] = max(row.time, times.get(row.step, row.time))
    steps = tuple(times)
    batch, per_image = _global_batch(run), _flops_per_image(run.folder)
    samples = None if batch is None else tuple(float(step * batch) for step in steps)
    return Progress(
        steps=steps,
        hours=_hours(run, list(times.values())),
        samples=samples,
        flops=None
        if samples is None or per_image is None
        else tuple(count * per_image for count in samples),
    )


def _hours(run: ComparedRun, times: list[float]) -> tuple[float, ...]:
    """Hours since the first of `times`, which are unix seconds in the order of their steps."""
    start = min(times)
    attempts = [] if run.folder is None else read_attempts(run.folder)
    waits = [
        (max(start, before.ended), after.started)
        for before, after in pairwise(attempts)
        if before.ended is not None and after.started > max(start, before.ended)
    ]
    running = (
        time - start - sum(min(time, stop) - begin for begin, stop in waits if begin < time)
        for time in times
    )
    return tuple(accumulate((seconds / SECONDS_PER_HOUR for seconds in running), max))


def _global_batch(run: ComparedRun) -> int | None:
    text = run.params.get("data.global_batch", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _flops_per_image(folder: Path | None) -> float | None:
    """FLOPs of a training step per image; None for what is no training run."""
    if folder is None:
        return None
    try:
        run = load_run_file(RUN_TYPES, folder / "config.yaml")
        assert isinstance(run, PretrainRun | FinetuneRun)
        arch = run.model.resolved(num_classes=_num_classes(folder))
        return float(run.make_objective().train_flops_per_image(arch))
    # A teacher may be missing, or the file is of another version, or of no training.
    except (UserError, OSError, ImportError):
        return None


def _num_classes(folder: Path) -> int:
    """From the run's classes.json; 0 without it, which leaves out the head."""
    try:
        classes = json.loads((folder / "classes.json").read_bytes())
    except (OSError, ValueError):
        return 0
    return len(classes) if isinstance(classes, list) else 0
