"""Find the runs to compare, by folder, name or MLflow id, and read them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from finetune.run import FinetuneRun
from launch.jobs.attempts import read_attempts
from launch.jobs.preparation import RUN_TYPES
from launch.jobs.run_folders import RUNS_FOLDER, find_runs, for_each
from launch.jobs.run_states import jobs_for, read_state
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run_file, read_values
from vitscale.config.redaction import flatten_params, redact, short_reason
from vitscale.tracking.journal import JOURNAL_NAME, Row, read_rows
from vitscale.tracking.mlflow_sync import (
    CONFIG_NAME,
    FOLDER_TAG,
    VAL_DATA_TAG,
    origin_line,
    read_record,
    stored_runs,
)
from vitscale.tracking.run_files import check_records
from vitscale.tracking.settings import absolute_uri, default_uri, sqlite_path

MAX_FILTERED = 50
AXES = ("steps", "samples", "hours", "flops")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run to compare. `source` names where its metrics were read."""

    label: str
    source: str
    params: dict[str, str]
    rows: tuple[Row, ...]
    folder: Path | None = None
    status: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    """Its tags in MLflow, the run folder among them."""

    @cached_property
    def steps(self) -> list[int]:
        """Logged steps, ascending, each once."""
        return sorted({row.step for row in self.rows})

    @cached_property
    def totals(self) -> dict[str, list[float]]:
        """Known axes of `AXES` -> what the run had spent at each of `steps`.

        FLOPs are those of the run itself: forward and backward passes by formula, without
        evaluations and without `init`.
        """
        totals = {"steps": [float(step) for step in self.steps], "hours": _hours(self)}
        batch = self.params.get("data.global_batch", "")
        if batch.isdecimal():
            totals["samples"] = [step * float(batch) for step in self.steps]
            per_image = _flops_per_image(self.folder)
            if per_image is not None:
                totals["flops"] = [count * per_image for count in totals["samples"]]
        return totals

    @property
    def is_evaluation(self) -> bool:
        return self.params.get("stage") == "evaluate"

    @property
    def origin(self) -> str:
        """When, from which commit, on which data and by whom it was made."""
        return origin_line(self.tags, time_s=self.rows[0].time)

    @property
    def val_data(self) -> str:
        """Name, number of images and fingerprint of what it was evaluated on."""
        return self.tags.get(VAL_DATA_TAG, "")

    def series(self, key: str) -> list[tuple[int, float]]:
        """Step and value of a metric, wherever it was logged."""
        return [(row.step, row.metrics[key]) for row in self.rows if key in row.metrics]


def _hours(run: ComparedRun) -> list[float]:
    """Hours since the first line, without the waits between two attempts that are recorded."""
    logged: dict[int, float] = {}
    for row in run.rows:
        logged[row.step] = max(row.time, logged.get(row.step, row.time))
    start = min(logged.values())
    attempts = []
    if run.folder is not None:
        attempts = read_attempts(run.folder)
    waits = [
        (max(start, before.ended), after.started)
        for before, after in itertools.pairwise(attempts)
        if before.ended is not None and after.started > max(start, before.ended)
    ]

    hours = []
    for step in run.steps:
        time = logged[step]
        waited = sum(min(time, end) - begin for begin, end in waits if begin < time)
        hours.append((time - start - waited) / 3600)
    # Clocks of two nodes may differ, and no step costs less than nothing.
    return list(itertools.accumulate(hours, max))


def _flops_per_image(folder: Path | None) -> float | None:
    """FLOPs of a training step per image; None if the folder is not a training run."""
    if folder is None:
        return None
    try:
        run = load_run_file(RUN_TYPES, folder / CONFIG_NAME)
        if not isinstance(run, PretrainRun | FinetuneRun):
            return None
        classes = folder / "classes.json"
        num_classes = 0
        if classes.exists():
            num_classes = len(json.loads(classes.read_bytes()))
        arch = run.model.resolved(num_classes=num_classes)
        return float(run.make_objective().train_flops_per_image(arch))
    # A teacher may be missing, or the file is of another version, or of no training.
    except (ValueError, OSError, ImportError):
        return None


def load_runs(names: Sequence[str], *, uri: str | None) -> list[ComparedRun]:
    """Find and read every run; the folder of a chain stands for the runs below it.

    uri: MLflow store to search first; None: the default one, searched last.
    Raises UserErrors that name all runs not found.
    """
    found = for_each(names, partial(_load, uri=uri))
    runs = _once_each(itertools.chain.from_iterable(found))
    return _with_distinct_labels(_with_states(runs))


def _once_each(runs: Iterable[ComparedRun]) -> list[ComparedRun]:
    """Runs that are named twice, such as by a link to the folder, count once."""
    found: dict[str, ComparedRun] = {}
    for run in runs:
        place = run.source
        if run.folder is not None:
            place = str(run.folder.resolve())
        if place in found:
            print(f"{place} is named twice: it counts once", file=sys.stderr)
        found.setdefault(place, run)
    return list(found.values())


def _with_states(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Add what runs read from folders are doing: SLURM is asked once for all."""
    jobs = jobs_for([run.folder for run in runs if run.folder is not None])
    for place, run in enumerate(runs):
        if run.folder is not None:
            state = read_state(run.folder.resolve(), jobs).state
            runs[place] = replace(run, status=str(state))
    return runs


def search_runs(query: str, *, uri: str | None) -> list[ComparedRun]:
    """Runs of an MLflow store that its filter finds, newest first. Raises UserError for none."""
    runs = [
        run
        for run in _stored(uri or default_uri(), query, limit=MAX_FILTERED)
        if run.rows
    ]
    if not runs:
        raise UserError(f"no run with metrics matches {query!r}", where="--filter")
    return _with_distinct_labels(runs)


def _with_distinct_labels(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Make labels unique: the folders from where they part, then append a number."""
    folders: dict[str, list[Path]] = {}
    for run in runs:
        if run.folder is not None:
            folders.setdefault(run.label, []).append(run.folder.resolve())

    seen = Counter[str]()
    for place, run in enumerate(runs):
        label = run.label
        shared = set(folders.get(label, ()))
        if len(shared) > 1 and run.folder is not None:
            label = os.path.relpath(run.folder.resolve(), os.path.commonpath(shared))
        seen[label] += 1
        if seen[label] > 1:
            label += f" ({seen[label]})"
        runs[place] = replace(run, label=label)
    return runs


def _load(name: str, *, uri: str | None) -> list[ComparedRun]:
    name = os.path.expanduser(name)
    is_here = Path(name).is_dir() or (RUNS_FOLDER / name).is_dir()
    if uri is not None or not is_here:
        for attribute in ("run_name", "run_id"):
            query = f"attributes.{attribute} = {name!r}"
            # The second one shows whether the name is that of one run.
            if stored := _stored(uri or default_uri(), query, limit=2):
                newest = stored[0]
                if not newest.rows:
                    raise UserError(
                        f"the MLflow run {name!r} has no metrics", where="RUN"
                    )
                if len(stored) > 1:
                    newest = replace(
                        newest, label=f"{newest.label} (newest of this name)"
                    )
                return [newest]
    folders = find_runs([name])
    # Runs of a chain that have not started are left out.
    begun = [folder for folder in folders if (folder / JOURNAL_NAME).is_file()]
    found = [_read_folder(folder) for folder in begun or folders]
    if len(found) > 1:  # STAGE/RUN
        top = os.path.commonpath([run.source for run in found])
        found = [replace(run, label=os.path.relpath(run.source, top)) for run in found]
    return found


def _read_folder(folder: Path) -> ComparedRun:
    check_records(folder)
    # The journal has every metric; without one there is nothing to compare.
    journal = folder / JOURNAL_NAME
    rows: tuple[Row, ...] = ()
    reason = "does not exist"
    if journal.is_file():
        rows = tuple(row for row, _ in read_rows(journal))
        reason = "has no readable line"
    if not rows:
        raise UserError(
            f"no metrics to compare: {journal} {reason}",
            where="RUN",
            next_step="give the output folder of a training run that has logged at least one step",
        )

    # Somebody may have copied the journal alone.
    params: dict[str, str] = {}
    config = folder / CONFIG_NAME
    if config.is_file():
        params = flatten_params(read_values(config))
    tags = {FOLDER_TAG: str(folder.resolve())}
    record = read_record(folder)
    if record is not None:
        tags |= record.tags
    return ComparedRun(
        label=folder.resolve().name,
        source=str(folder),
        folder=folder,
        params=params,
        rows=rows,
        tags=tags,
    )


def _stored(uri: str, query: str, *, limit: int) -> list[ComparedRun]:
    """Runs of the store; none if there is no store. Raises UserError for one that fails."""
    uri = absolute_uri(uri, where="--uri")
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        return []
    try:
        found = list(stored_runs(uri, query, limit=limit))
    # Any failure of the server or its database is reported as a problem of the address.
    except Exception as error:
        where = "--uri"
        if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":
            where = "--filter"
        raise UserError(
            f"MLflow at {redact(uri)} cannot be read: {short_reason(error)}",
            where=where,
            next_step="check it, or give run folders instead",
        ) from None
    # A run of the store may have no folder here: what it logged is all that is read.
    return [
        ComparedRun(
            label=run.info.run_name,
            source=f"MLflow run {run.info.run_id}",
            status=run.info.status.lower(),
            params=dict(run.data.params),
            rows=tuple(rows),
            tags=dict(run.data.tags),
        )
        for run, rows in found
    ]
