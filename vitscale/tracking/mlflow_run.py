"""Bring the MLflow run of a run folder up to date.

Owns: finding or creating the run, its description, sending each point and file that the store
lacks. A training keeps its run up to date (`delivery`); `compare.py sync` copies any run folder.
Leaves out: connections (`mlflow_client`), threads and outages (`delivery`), the journal
(`journal`), and how a copied run ended (`launch/comparison/sync.py`). Every call here may block or
raise; none belongs in a training loop.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from vitscale.config.redaction import redact, short_reason
from vitscale.tracking.journal import JOURNAL_NAME, Row, read_rows
from vitscale.tracking.mlflow_client import (
    STATUS_TAG,
    Say,
    active_run,
    create_run,
    linked_run,
    metric_points,
    open_client,
    read_link,
    set_status,
    tagged_run,
)
from vitscale.tracking.parent_run import PARENT_TAG
from vitscale.tracking.run_facts import (
    CONFIG_ARTIFACT,
    MAX_NOTE_CHARS,
    NOTE_TAG,
    DatasetFacts,
    RunDescription,
    Status,
    clean_tags,
    flatten_params,
    redact_yaml,
    shared_config,
    sqlite_path,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow refuses longer digests (3.17).
MAX_DIGEST_CHARS = 36
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
ROWS_PER_ROUND = 200
# Counts of what may never happen. MLflow has them from the first event on.
EVENT_COUNTS = {
    "train/skipped_steps",
    "vitals/unreadable",
}
# Hash of a copied run's first line of the journal.
JOURNAL_TAG = "vitscale.journal"
# Id of the run in the store that it was tracked in.
COPIED_TAG = "vitscale.copied_from"
COMMIT_TAG = "mlflow.source.git.commit"
RUN_ID = re.compile(r"[0-9a-f]{32}")

Entry = TypeVar("Entry")


@dataclass(kw_only=True, slots=True)
class MlflowRun:
    """The open MLflow run of a run folder."""

    client: Any
    folder: Path
    run_id: str
    experiment: str
    """Its id."""
    present: dict[str, set[int]] = field(default_factory=dict)
    """The points in the store: key -> steps."""
    offset: int = 0
    """The lines of the journal before it are sent."""

    def send_journal(self) -> int:
        """Send the points (one key at one step) that the store lacks. Returns how many.

        After an error the run must be opened again: which points arrived is not known.
        """
        from mlflow.entities import Metric

        num_points = 0
        rows = read_rows(self.folder / JOURNAL_NAME, offset=self.offset)
        while chunk := list(itertools.islice(rows, ROWS_PER_ROUND)):
            points = [
                Metric(key, value, int(row.time * 1000), row.step)
                for row, _ in chunk
                for key, value in self._lacking(row)
            ]
            for batch in _batches(points, METRICS_PER_BATCH):
                self.client.log_batch(self.run_id, metrics=batch)
            num_points += len(points)
            self.offset = chunk[-1][1]
        return num_points

    def _lacking(self, row: Row) -> Iterator[tuple[str, float]]:
        """Yield the points of a row that the store lacks, each once."""
        for key, value in row.metrics.items():
            steps = self.present.get(key)
            if value == 0 and key in EVENT_COUNTS and (steps is None or min(steps) > row.step):
                continue
            if steps is None or row.step not in steps:
                self.present.setdefault(key, set()).add(row.step)
                yield key, value

    def set_status(self, status: str, *, end_time: float | None = None) -> None:
        set_status(self.client, self.run_id, status, end_time=end_time)

    def upload(self, path: Path) -> None:
        """Upload a file of the run folder, into the same subfolder."""
        self.client.log_artifact(self.run_id, str(path), self._place(path))

    def upload_new(self, path: Path) -> bool:
        """Upload it unless the store has a file of this name and size; whether it was done."""
        place = self._place(path)
        name = path.name if place is None else f"{place}/{path.name}"
        stored = {
            each.path: each.file_size for each in self.client.list_artifacts(self.run_id, place)
        }
        if stored.get(name) == path.stat().st_size:
            return False
        self.upload(path)
        return True

    def _place(self, path: Path) -> str | None:
        is_inside = path.is_relative_to(self.folder)
        place = path.relative_to(self.folder).parent if is_inside else Path()
        return None if place == Path() else place.as_posix()


def start_run(description: RunDescription, *, say: Say) -> MlflowRun:
    """Find or create the run of a training, set it RUNNING, and write its description.

    A run that it replaces and that was left open is closed.
    """
    client = open_client(description.uri, say=say)
    tags = description.record.tags | {"vitscale.run_folder": str(description.folder.absolute())}
    known = linked_run(client, description.folder, uri=description.uri)
    tags |= _resume_tags(known, description)
    if known is not None and not _is_same(known, description):
        say(f"MLflow run {known.info.run_id} belongs to a different earlier run; creating another")
        tags["vitscale.replaces_run"] = known.info.run_id
        _close(client, known)
        known = None
    if known is None:
        tags[STATUS_TAG] = "running"
        known = _create(client, description, tags, folder=description.folder)
    else:
        set_status(client, known.info.run_id, "RUNNING")
    return _describe(client, known, tags, description)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """The run of a folder in the store, and what was missing there."""

    run: MlflowRun
    num_points: int
    num_files: int


def copy_run(
    description: RunDescription, *, files: Sequence[Path], status: Status, ended: float, say: Say
) -> Copied:
    """Bring a run folder's MLflow run up to date, or create it, with the original times.

    Writes what the store lacks and nothing else, so an interrupted call is completed by another.
    A run that is not linked is found again by a hash of the journal's first line.
    """
    client = open_client(description.uri, say=say)
    with open(description.folder / JOURNAL_NAME, "rb") as file:
        identity = hashlib.sha256(file.readline()).hexdigest()[:32]
    tags = _with_known_parent(client, description.record.tags)
    # The link is followed under any address of the store.
    link = read_link(description.folder)
    known = None if link is None else active_run(client, link["run_id"])
    known = known or tagged_run(client, JOURNAL_TAG, identity)
    if known is None:
        origin = {} if link is None else {COPIED_TAG: link["run_id"]}
        marks = {JOURNAL_TAG: identity} | origin
        known = _create(client, description, tags | marks, folder=None)
    run = _describe(client, known, tags, description)
    num_points = run.send_journal()
    num_files = sum(map(run.upload_new, files))
    if known.data.tags.get(STATUS_TAG) != status.lower():
        run.set_status(status, end_time=ended)
    return Copied(run=run, num_points=num_points, num_files=num_files)


def _create(
    client: MlflowClient,
    description: RunDescription,
    tags: Mapping[str, str],
    *,
    folder: Path | None,
) -> Any:
    return create_run(
        client,
        uri=description.uri,
        experiment=description.record.experiment,
        name=description.record.name,
        tags=tags,
        start_time=description.start_time,
        folder=folder,
    )


def _describe(
    client: MlflowClient, known: Any, tags: Mapping[str, str], description: RunDescription
) -> MlflowRun:
    """Open the run and write what it lacks: tags, parameters, note, datasets, configuration."""
    from mlflow.entities import Param, RunTag

    run_id, stored = known.info.run_id, known.data
    record, params = description.record, flatten_params(description.params)
    tags = clean_tags({**tags, **_changed_params(stored.params, params)})
    # A description that somebody edited stays.
    if record.note and NOTE_TAG not in stored.tags:
        tags[NOTE_TAG] = redact(record.note)[:MAX_NOTE_CHARS]
    new_tags = [RunTag(*tag) for tag in tags.items() if stored.tags.get(tag[0]) != tag[1]]
    for tag_batch in _batches(new_tags, PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=tag_batch)
    new_params = [Param(*param) for param in params.items() if param[0] not in stored.params]
    for param_batch in _batches(new_params, PARAMS_PER_BATCH):
        client.log_batch(run_id, params=param_batch)
    _log_datasets(client, known, record.datasets)
    if CONFIG_ARTIFACT not in {file.path for file in client.list_artifacts(run_id)}:
        shared = shared_config(yaml.safe_load(description.config_yaml))
        text = redact_yaml(yaml.safe_dump(shared, sort_keys=False))
        client.log_text(run_id, text, CONFIG_ARTIFACT)
    run = MlflowRun(
        client=client,
        folder=description.folder,
        run_id=run_id,
        experiment=known.info.experiment_id,
    )
    for point in metric_points(client, known):
        run.present.setdefault(point.key, set()).add(point.step)
    return run


def _batches(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for i in range(0, len(entries), size):
        yield entries[i : i + size]


def _log_datasets(client: MlflowClient, known: Any, datasets: Sequence[DatasetFacts]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    stored = () if known.inputs is None else known.inputs.dataset_inputs  # None when created
    present = {(each.dataset.name, each.dataset.digest) for each in stored}
    inputs = [
        DatasetInput(
            Dataset(
                name=each.name,
                digest=each.digest[:MAX_DIGEST_CHARS],
                source_type="vitscale-shards",
                source=json.dumps({"uri": redact(each.source)}),
                profile=json.dumps(each.counts()),
            ),
            [InputTag("mlflow.data.context", each.context)],
        )
        for each in datasets
        if (each.name, each.digest[:MAX_DIGEST_CHARS]) not in present
    ]
    if inputs:
        client.log_inputs(known.info.run_id, datasets=inputs)


def _close(client: MlflowClient, known: Any) -> None:
    """End a run that was left open, at the time of its last point."""
    if known.info.status not in ("RUNNING", "SCHEDULED"):
        return
    moments = (point.timestamp for point in metric_points(client, known))
    last = max(moments, default=known.info.start_time)
    set_status(client, known.info.run_id, "KILLED", end_time=last / 1000)


def _is_same(known: Any, description: RunDescription) -> bool:
    """Whether to continue the folder's MLflow run.

    From a checkpoint: always. From step 0: only an unfinished run with the same configuration and
    commit, which reproduces the same points; points in MLflow cannot be replaced.
    """
    if description.resume_step > 0:
        return True
    return (
        known.info.status != "FINISHED"
        and known.data.params == flatten_params(description.params)
        and known.data.tags.get(COMMIT_TAG) == description.record.tags.get(COMMIT_TAG)
    )


def _resume_tags(known: Any | None, description: RunDescription) -> dict[str, str]:
    if description.resume_step == 0:
        return {}
    tags = {"vitscale.resumed_from_step": str(description.resume_step)}
    if known is None and read_link(description.folder) is not None:
        tags["vitscale.restored_from_journal"] = "true"
    return tags


def _changed_params(stored: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    """Tag with the parameters that a resume changed: those of an MLflow run cannot change."""
    changed = [
        f"{key}: {stored[key]} -> {value}"
        for key, value in params.items()
        if key in stored and stored[key] != value
    ]
    return {"vitscale.changed_params": "; ".join(changed)} if changed else {}


def _with_known_parent(client: MlflowClient, tags: Mapping[str, str]) -> dict[str, str]:
    """The tags with the parent's id in this store; without a parent that is not in it."""
    others = {key: value for key, value in tags.items() if key != PARENT_TAG}
    parent = tags.get(PARENT_TAG)
    if parent is None or not RUN_ID.fullmatch(parent):
        return others
    run = active_run(client, parent) or tagged_run(client, COPIED_TAG, parent)
    return others if run is None else others | {PARENT_TAG: run.info.run_id}


def upload_to_linked_run(
    folder: Path, files: Sequence[Path], *, say: Say, place: str | None = None
) -> bool:
    """Upload files to the MLflow run that a run folder is linked to; whether it was done.

    place: folder among the run's artifacts; None: the top.
    Says what was done. A failure is said too and not raised: the files themselves are on disk.
    """
    link = read_link(folder)
    if link is None or not files:
        return False
    database = sqlite_path(link["uri"])
    if database is not None and not database.exists():
        say(f"warning: not uploaded to MLflow (there is no {database})")
        return False
    try:
        client = open_client(link["uri"], say=say)
        for path in files:
            client.log_artifact(link["run_id"], str(path), place)
    except Exception as error:
        say(f"warning: not uploaded to MLflow ({short_reason(error)})")
        return False
    say(f"uploaded to MLflow run {link['run_id']}")
    return True
