"""Copy runs from their folders into MLflow, TensorBoard or W&B, as often as wanted.

    python launch/compare.py sync RUN ... [--to STORE] [--uri URI] [--experiment NAME]

Owns: the command line, and how a run ended that could not say so.
Leaves out: the stores (`vitscale.tracking`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launch.jobs.run_folders import find_runs, for_each
from launch.jobs.run_states import RunState, RunStatus, jobs_for, read_state
from vitscale.config.errors import UserError
from vitscale.config.loader import read_values
from vitscale.config.redaction import printable, redact, short_reason
from vitscale.tracking.journal import JOURNAL_NAME, read_rows
from vitscale.tracking.mlflow_sync import (
    CONFIG_NAME,
    MlflowRun,
    RunRecord,
    Status,
    read_record,
)
from vitscale.tracking.run_files import check_records
from vitscale.tracking.settings import absolute_uri, default_uri
from vitscale.tracking.tracker import Opener, reader_of

STATUS: dict[RunState, Status] = {
    RunState.RUNNING: "RUNNING",
    RunState.QUEUED: "PAUSED",
    RunState.PAUSED: "PAUSED",
    RunState.FAILED: "FAILED",
}


def sync(arguments: Sequence[str]) -> None:
    """Copy the runs. Raises UserErrors before anything is written where a folder is no run."""
    parser = argparse.ArgumentParser(
        prog="vitscale compare sync",
        description="Copy runs from their folders into a store. Sends what is missing: a second "
        "time, nothing.",
        allow_abbrev=False,
    )
    help_text = "run folder, name under runs/, or folder of runs"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=help_text)
    parser.add_argument(
        "--uri",
        help="MLflow store; default: that of the site file, else runs/mlflow.db",
    )
    parser.add_argument(
        "--experiment", help="of new MLflow runs; default: that of each run"
    )
    stores = ("mlflow", "tensorboard", "wandb")
    parser.add_argument(
        "--to", choices=stores, default="mlflow", help="default: mlflow"
    )
    given = parser.parse_args(arguments)
    uri = absolute_uri(given.uri or default_uri(), where="--uri")
    opener: Opener = partial(MlflowRun, uri=uri, experiment=given.experiment, say=print)
    if given.to != "mlflow":
        opener = reader_of(given.to, where="--to")
    # All folders are looked at first, so that a wrong name costs nothing.
    starts = for_each(find_runs(given.runs), _start)
    jobs = jobs_for([folder for _, folder in starts])
    # A parent starts before its children, which name it.
    for start, folder in sorted(starts):
        state, record = read_state(folder, jobs), read_record(folder)
        ended = (record and record.ended) or state.logged.time or start
        status = final_status(state, record)
        try:
            done = opener(folder)
            done.sync(status, ended=ended)
        # Any failure of a server or its database is reported as a problem of the address.
        except Exception as error:
            raise UserError(
                f"cannot copy {folder} to {given.to}: {short_reason(error)}",
                where=f"--uri {redact(uri)}" if given.to == "mlflow" else "--to",
                next_step="run the same command again; it sends what is missing",
            ) from None
        print(
            f"{folder}: sent {done.num_points} points, {done.num_files} files; "
            f"{status.lower()}; run {printable(done.run_id)}"
        )
    print(f"{given.to}: {done.page}")


def _start(folder: Path) -> tuple[float, Path]:
    """Time of the first line of the journal, and the folder. Raises UserError if it is no run."""
    check_records(folder)
    journal, config = folder / JOURNAL_NAME, folder / CONFIG_NAME
    first = next(read_rows(journal), None) if journal.is_file() else None
    if first is None:
        raise UserError(
            "has no metrics", where=journal, next_step="name a run that has some"
        )
    if not config.is_file() or not read_values(config):
        raise UserError("is not the configuration of a run", where=config)
    return first[0].time, folder


def final_status(state: RunStatus, record: RunRecord | None) -> Status:
    """Return how a run ended: as its last process recorded, else by its folder and the queue."""
    if state.state in STATUS:
        return STATUS[state.state]
    if record is not None and record.ended is not None:
        return record.status
    return "FINISHED" if state.state is RunState.FINISHED else "KILLED"
