"""Copy runs from their folders into an MLflow store, as often as wanted.

    python launch/compare.py sync RUN ... [--uri URI] [--experiment NAME]

Owns: the command line, what of a run folder is copied, and how a run ended that could not say so.
Leaves out: MLflow (`vitscale.tracking.mlflow_run`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.comparison.runs import default_uri, known_jobs, read_config
from launch.jobs.attempts import Ending
from launch.jobs.queue import QueuedJob
from launch.jobs.status.states import RunState, RunStatus, find_runs, read_state
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.redaction import redact, short_reason
from vitscale.tracking.journal import JOURNAL_NAME, read_rows
from vitscale.tracking.mlflow_run import copy_run
from vitscale.tracking.run_facts import (
    CONFIG_ARTIFACT,
    RunDescription,
    RunRecord,
    Status,
    absolute_uri,
    chart_page,
    read_record,
)
from vitscale.tracking.settings import TrackingSettings

PICTURES = "pictures/*.png"
STATUS: dict[RunState, Status] = {
    RunState.RUNNING: "RUNNING",
    RunState.QUEUED: "PAUSED",
    RunState.PAUSED: "PAUSED",
    RunState.FINISHED: "FINISHED",
    RunState.FAILED: "FAILED",
}
KILLED = (Ending.KILLED, Ending.LOST, Ending.ENDED_BY_SLURM, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunToCopy:
    """A run folder to copy."""

    description: RunDescription
    files: tuple[Path, ...]
    status: Status
    ended: float
    """Unix seconds."""


def sync(arguments: Sequence[str]) -> None:
    """Copy the runs. Raises UserErrors before anything is written where a folder is no run."""
    parser = argparse.ArgumentParser(
        prog="python launch/compare.py sync",
        description="Copy runs from their folders into an MLflow store. Sends what is missing: a "
        "second time, nothing.",
        allow_abbrev=False,
    )
    help_text = "run folder, name under runs/, or folder of runs"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=help_text)
    parser.add_argument(
        "--uri", help="MLflow store; default: that of the site file, else runs/mlflow.db"
    )
    parser.add_argument("--experiment", help="of new MLflow runs; default: that of each run")
    given = parser.parse_args(arguments)
    uri = absolute_uri(given.uri or default_uri(), where="--uri")
    for source in _read_all(given.runs, uri=uri, experiment=given.experiment):
        folder = source.description.folder
        try:
            done = copy_run(
                source.description,
                files=source.files,
                status=source.status,
                ended=source.ended,
                say=print,
            )
        # Any failure of a server or its database is reported as a problem of the address.
        except Exception as error:
            raise UserError(
                f"MLflow at {redact(uri)} did not take {folder}: {short_reason(error)}",
                where="--uri",
                next_step="run the same command again; it sends what is missing",
            ) from None
        print(
            f"{folder}: sent {done.num_points} points, {done.num_files} files; "
            f"{source.status.lower()}; run {done.run.run_id}"
        )
    print(f"MLflow: {chart_page(uri, done.run.experiment)}")


def _read_all(names: Sequence[str], *, uri: str, experiment: str | None) -> list[RunToCopy]:
    jobs = known_jobs()
    sources: list[RunToCopy] = []
    errors: list[UserError] = []
    for folder in find_runs(names):
        try:
            sources.append(_read(folder, jobs, uri=uri, experiment=experiment))
        except UserError as error:
            errors.append(error)
    if errors:
        raise UserErrors(errors)
    # A parent starts before its children, which name it.
    return sorted(sources, key=lambda source: source.description.start_time)


def _read(
    folder: Path, jobs: list[QueuedJob] | None, *, uri: str, experiment: str | None
) -> RunToCopy:
    journal, config = folder / JOURNAL_NAME, folder / CONFIG_ARTIFACT
    first = next(read_rows(journal), None) if journal.is_file() else None
    if first is None:
        raise UserError("has no metrics", where=str(journal), next_step="give a run that has")
    text, params = read_config(config)
    if not params:
        raise UserError("is no configuration of a run", where=str(config))
    state, record = read_state(folder, jobs), read_record(folder)
    status, ended = _ending(state, record)
    if record is None:
        record = RunRecord(
            name=str(params.get("name") or folder.resolve().name),
            experiment=TrackingSettings().experiment,
            tags={"vitscale.stage": str(params.get("stage"))},
        )
    if experiment is not None:
        record = record.model_copy(update={"experiment": experiment})
    description = RunDescription(
        folder=folder,
        uri=uri,
        record=record,
        params=params,
        config_yaml=text,
        start_time=first[0].time,
    )
    return RunToCopy(
        description=description,
        files=tuple(dict.fromkeys(_files(folder, record))),
        status=status,
        ended=ended or state.logged.time or first[0].time,
    )


def _files(folder: Path, record: RunRecord) -> Iterator[Path]:
    """Uploaded files and pictures. Nothing outside the folder, whatever the record says."""
    root = folder.resolve()
    named = [folder / name for name in record.files]
    for path in [*named, *sorted(folder.glob(PICTURES))]:
        if path.resolve().is_relative_to(root):
            found = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield from (each for each in found if each.is_file() and not each.is_symlink())


def _ending(state: RunStatus, record: RunRecord | None) -> tuple[Status, float | None]:
    """How the run ended, and when; None: with the last line of its journal."""
    attempt = state.attempt
    is_active = state.state in (RunState.RUNNING, RunState.QUEUED, RunState.PAUSED)
    if not is_active and record is not None and record.ended is not None:
        if attempt is None or attempt.started <= record.ended:
            return record.status, record.ended
    ended = None if attempt is None else attempt.ended
    if attempt is not None and attempt.ending is Ending.STOPPED:
        return "PAUSED", ended
    if not is_active and state.state is not RunState.FINISHED:
        if attempt is None or attempt.ending in KILLED:
            return "KILLED", ended
    return STATUS.get(state.state, "KILLED"), ended
