"""Prepare the replay of a stretch of a run, and compare its result with the run.

Owns: which steps, the configuration and the folder of the replay, and the verdict.
Leaves out: starting it (`launch/replay.py`), and how tensors are compared (`bitwise`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.comparison.bitwise import different_tensors, different_values, journal_metrics
from launch.jobs.preparation import RUN_TYPES, LaunchableRun, launchable
from vitscale.checkpoint.folders import (
    Checkpoint,
    read_checkpoint,
    read_description,
    step_folder,
    step_folders,
    step_of,
)
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run_file
from vitscale.runs.training import TrainingRun
from vitscale.tracking.journal import JOURNAL_NAME
from vitscale.tracking.run_facts import flatten_params

CHECKPOINTS = "checkpoints"
RECORD = "record"
SETTING = "config "
# Settings that change no bit of the result.
FREE_SETTINGS = (
    *("name", "output", "launch.", "checkpoint.", "schedule.stop_at_step"),
    *("tracking.uri", "tracking.experiment", "tracking.tags", "tracking.system_metrics"),
)
SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The steps of a run that are trained again."""

    folder: Path
    """Of the run. Never written to."""
    run: TrainingRun
    """Its configuration."""
    start: int
    """Step of the checkpoint that the replay starts from; 0: none."""
    stop: int
    record: dict[str, str]
    """What the checkpoint at `stop` says of how it was made; that of `start` if it is not kept."""
    kept: tuple[int, ...]
    """Steps after `start`, up to `stop`, of which the run has a checkpoint."""

    @property
    def num_ranks(self) -> int:
        return int(self.record["number of ranks"])

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def title(self) -> str:
        return f"steps {self.start} to {self.stop} of {self.folder} on {self.num_ranks} rank(s)"


def find_stretch(
    folder: Path, *, start: int | None, stop: int | None, config: Path | None
) -> Stretch:
    """start, stop: None: the last two checkpoints. config: None: the run's config.yaml.

    Raises UserError when the steps are not there, or were trained with other settings.
    """
    run = _read_run(folder, config or folder / "config.yaml")
    steps = sorted(step_of(path) for path in step_folders(folder / CHECKPOINTS))
    if not steps:
        raise UserError("no checkpoint", where=str(folder / CHECKPOINTS))
    stop = steps[-1] if stop is None else stop
    if start is None:
        start = max((step for step in steps if step < stop), default=0)
    allowed = f"0 (the start), {', '.join(map(str, steps))}"
    if start not in (0, *steps):
        raise UserError(f"no checkpoint of step {start}", where="--from-step", allowed=allowed)
    if stop <= start:
        what = f"{stop} is not after step {start}, where the replay starts"
        raise UserError(what, where="--to-step", allowed=f"checkpoints: {allowed}")
    if stop not in steps:
        last = max(journal_metrics(folder / JOURNAL_NAME, after=start, until=stop), default=start)
        if last == start:
            what = f"neither a checkpoint of step {stop} nor lines of the journal up to it"
            raise UserError(what, where="--to-step", allowed=f"checkpoints: {allowed}")
    source = next(step for step in (stop, start, steps[0]) if step in steps)
    described, _ = read_description(step_folder(folder / CHECKPOINTS, source))
    record = described.description.get(RECORD)
    if not isinstance(record, dict) or "number of ranks" not in record:
        where = str(described.folder)
        raise UserError("does not say on how many ranks it was trained", where=where)
    kept = tuple(step for step in steps if start < step <= stop)
    stretch = Stretch(folder=folder, run=run, start=start, stop=stop, record=record, kept=kept)
    _check_settings(stretch)
    return stretch


def _read_run(folder: Path, config: Path) -> TrainingRun:
    if not config.is_file():
        what = "no such file" if folder.is_dir() else "no such run folder"
        raise UserError(what, where=str(config if folder.is_dir() else folder))
    run = load_run_file(RUN_TYPES, config)
    if not isinstance(run, TrainingRun):
        raise UserError("is no training run", where=str(config))
    return run


def _check_settings(stretch: Stretch) -> None:
    """Raise UserError when settings differ from those that the steps were trained with."""
    now = flatten_params(stretch.run.model_dump())
    saved = {k.removeprefix(SETTING): v for k, v in stretch.record.items() if k.startswith(SETTING)}
    changed = [
        f"    {key}: {saved[key]} -> {now.get(key, 'not set')}"
        for key in sorted(saved)
        if now.get(key) != saved[key] and not key.startswith(FREE_SETTINGS)
    ]
    if changed:
        raise UserError(
            "\n".join(["settings have changed since the steps were trained:", *changed]),
            where=str(stretch.folder / "config.yaml"),
            next_step="give the configuration of then with --config; the folders local/ and slurm/ "
            "of the run keep one for each start",
        )


def replay_run(stretch: Stretch, scratch: Path) -> LaunchableRun:
    """The configuration of the replay, whose run folder is `scratch`."""
    run, every = stretch.run, stretch.run.checkpoint.every_steps
    num_kept = stretch.stop // every - stretch.start // every + 2
    engine = run.engine
    if stretch.record.get("device") == "cpu" and "threads per rank" in stretch.record:
        # The number of threads decides the order of additions.
        threads = int(stretch.record["threads per rank"])
        engine = engine.model_copy(update={"num_threads": threads})
    settings: dict[str, Any] = {
        "output": str(scratch),
        "engine": engine,
        "schedule": run.schedule.model_copy(update={"stop_at_step": stretch.stop}),
        "checkpoint": run.checkpoint.model_copy(update={"keep": num_kept, "resume": "auto"}),
        "tracking": run.tracking.model_copy(update={"uri": None}),
    }
    return launchable(run.model_copy(update=settings))


def fill_scratch(stretch: Stretch, scratch: Path) -> None:
    """Give the replay the checkpoint that it starts from: links, or copies on another disk."""
    (scratch / CHECKPOINTS).mkdir(parents=True)
    if stretch.start == 0:
        return
    source = step_folder(stretch.checkpoints, stretch.start)
    target = step_folder(scratch / CHECKPOINTS, stretch.start)
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compare(stretch: Stretch, scratch: Path) -> list[str]:
    """Lines that say what differs, the first step first; empty when all is equal.

    Raises UserError for a damaged checkpoint.
    """
    rows, replayed = (
        journal_metrics(folder / JOURNAL_NAME, after=stretch.start, until=stretch.stop)
        for folder in (stretch.folder, scratch)
    )
    found = []
    for step in sorted({*rows, *replayed, *stretch.kept}):
        lines: list[str] = []
        if step in stretch.kept and step_folder(scratch / CHECKPOINTS, step).is_dir():
            ours = read_checkpoint(step_folder(stretch.checkpoints, step))
            lines += _checkpoint_lines(
                ours, read_checkpoint(step_folder(scratch / CHECKPOINTS, step))
            )
        values = different_values(rows.get(step, {}), replayed.get(step, {}))
        lines += _shortened([f"journal: {line}" for line in values])
        found += [f"step {step}: {line}" for line in lines]
    return found


def _checkpoint_lines(ours: Checkpoint, theirs: Checkpoint) -> Iterator[str]:
    unequal = different_tensors(ours, theirs)
    if unequal:
        ranks = ", ".join(str(rank) for rank in sorted({each.rank for each in unequal}, key=str))
        names = {each.name for each in unequal}
        yield f"{len(names)} tensor(s) differ, saved by rank(s) {ranks}"
        yield from _shortened([each.text for each in unequal])
    for name in ("progress", "description"):
        a, b = (dict(getattr(each, name)) for each in (ours, theirs))
        a.pop(RECORD, None), b.pop(RECORD, None)
        yield from _shortened([f"{name}: {line}" for line in different_values(a, b)])


def _shortened(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {more} more"] if more > 0 else [])]


def changed_environment(stretch: Stretch, scratch: Path) -> list[str]:
    """What the replay was trained with that the run was not: versions, device, threads."""
    folder = step_folder(scratch / CHECKPOINTS, stretch.stop)
    record = read_description(folder)[0].description[RECORD]
    return [
        f"{key}: {stretch.record.get(key, 'unknown')}, replay {value}"
        for key, value in record.items()
        if not key.startswith(SETTING) and stretch.record.get(key) != value
    ]
