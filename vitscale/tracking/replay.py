"""Copy a run folder into an MLflow store, as often as wanted.

Owns: finding the run that a folder was copied to, and writing what is missing there.
Leaves out: which folders, and how a run ended (`launch/comparison/sync.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_client import (
    STATUS_TAG,
    Say,
    active_run,
    experiment_id,
    open_client,
    read_link,
)
from vitscale.tracking.mlflow_store import (
    MlflowRun,
    changed_params,
    clean_tags,
    describe,
    log_tags,
    reopened,
)
from vitscale.tracking.parent_run import PARENT_TAG
from vitscale.tracking.run_facts import RunDescription, Status, flatten_params

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ROWS_PER_CALL = 200
JOURNAL_TAG = "vitscale.journal"
# Id of the run in the store that it was tracked in.
COPIED_TAG = "vitscale.copied_from"
RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A run folder as it is in the store now, and what was missing there."""

    run_id: str
    experiment: str
    """Its id."""
    num_points: int
    num_files: int


def replay_run(
    description: RunDescription,
    *,
    journal: Path,
    files: Sequence[Path],
    status: Status,
    ended: float,
    say: Say,
) -> Replayed:
    """Bring a run folder's MLflow run up to date, or create it, with the original times.

    Writes what the store lacks and nothing else, so an interrupted call is completed by another.
    A run that is not linked is found again by a hash of the journal's first line.
    """
    client = open_client(description.uri, say=say)
    with open(journal, "rb") as file:
        identity = hashlib.sha256(file.readline()).hexdigest()[:32]
    params = flatten_params(description.params)
    known = _replayed_run(client, description.folder, identity)
    tags = clean_tags(_with_known_parent(client, description.record.tags))
    if known is None:
        created = client.create_run(
            experiment_id(client, description.record.experiment, uri=description.uri),
            run_name=description.record.name,
            start_time=int(description.start_time * 1000),
            tags=tags | {JOURNAL_TAG: identity} | _origin(description.folder),
        )
        run = MlflowRun(
            client=client, run_id=created.info.run_id, experiment=created.info.experiment_id
        )
    else:
        run = reopened(client, known)
        tags |= changed_params(known.data.params, params)
        stored = known.data.tags
        log_tags(client, run.run_id, {k: v for k, v in tags.items() if stored.get(k) != v})
    describe(run, known, params, description)
    before = run.num_points
    rows = (row for row, _ in read_rows(journal))
    while chunk := list(itertools.islice(rows, ROWS_PER_CALL)):
        run.write(chunk)
    num_points = run.num_points - before
    num_files = sum(run.upload_new(path, folder=description.folder) for path in files)
    if known is None or known.data.tags.get(STATUS_TAG) != status.lower():
        run.set_status(status, end_time=ended)
    return Replayed(
        run_id=run.run_id, experiment=run.experiment, num_points=num_points, num_files=num_files
    )


def _replayed_run(client: MlflowClient, folder: Path, identity: str) -> Any | None:
    """The run that the folder was tracked in, or copied to, whatever the store's address was."""
    link = read_link(folder)
    if link is not None and (run := active_run(client, link["run_id"])) is not None:
        return run
    return _tagged(client, JOURNAL_TAG, identity)


def _tagged(client: MlflowClient, tag: str, value: str) -> Any | None:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{tag}` = '{value}'", max_results=1)
    return found[0] if found else None


def _origin(folder: Path) -> dict[str, str]:
    link = read_link(folder)
    return {} if link is None else {COPIED_TAG: link["run_id"]}


def _with_known_parent(client: MlflowClient, tags: Mapping[str, str]) -> dict[str, str]:
    """The tags with the parent's id in this store; without a parent that is not in it."""
    parent = tags.get(PARENT_TAG)
    if parent is None or not RUN_ID.fullmatch(parent):
        return {key: value for key, value in tags.items() if key != PARENT_TAG}
    run = active_run(client, parent) or _tagged(client, COPIED_TAG, parent)
    found = {} if run is None else {PARENT_TAG: run.info.run_id}
    return {key: value for key, value in tags.items() if key != PARENT_TAG} | found
