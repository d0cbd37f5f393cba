"""Read and write MLflow runs.

Owns: the MLflow run of a run folder across resumes, writing each point once, and reading runs for
comparisons.
Leaves out: connections (`mlflow_client`), threads and outages (`delivery`), the journal
(`journal`). Every call here may block or raise; none belongs in a training loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.config.redaction import redact
from vitscale.tracking.journal import Row, present_name
from vitscale.tracking.mlflow_client import (
    STATUS_TAG,
    Say,
    experiment_id,
    linked_run,
    open_client,
    read_link,
    set_status,
    write_link,
)
from vitscale.tracking.run_facts import (
    CONFIG_ARTIFACT,
    MAX_TAG_CHARS,
    NODE_PREFIX,
    NOTE_TAG,
    DatasetFacts,
    RunDescription,
    flatten_params,
    redact_yaml,
    sqlite_path,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow cuts longer notes without a word, and refuses longer digests (3.17).
MAX_NOTE_CHARS = 8000
MAX_DIGEST_CHARS = 36
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
FILTERED_RUNS = 50
SEARCHED_RUNS = 5000
# Counts of what may never happen. MLflow has them from the first event on.
EVENT_COUNTS = {
    "train/skipped_steps",
    "train/loss_spikes",
    "vitals/unreadable",
    "vitals/remote_retries",
    "vitals/remote_cache_hits",
    "vitals/remote_cache_failures",
}


@dataclass(kw_only=True, slots=True)
class MlflowRun:
    """One open MLflow run. `present`: the points in the store, key -> steps."""

    client: Any
    run_id: str
    experiment: str
    """Its id."""
    present: dict[str, set[int]] = field(default_factory=dict)

    def write(self, rows: Iterable[Row]) -> None:
        """Write the points (one key at one step) that the store lacks."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        for row in rows:
            for key, value in row.metrics.items():
                if self._lacks(key, value, step=row.step):
                    batch.append(Metric(key, value, int(row.time * 1000), row.step))
                    self.present.setdefault(key, set()).add(row.step)
        for i in range(0, len(batch), METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=batch[i : i + METRICS_PER_BATCH])

    def _lacks(self, key: str, value: float, *, step: int) -> bool:
        steps = self.present.get(key)
        if value == 0 and key in EVENT_COUNTS:
            return steps is not None and min(steps) < step and step not in steps
        return steps is None or step not in steps

    def set_status(self, status: str, *, end_time: float | None = None) -> None:
        set_status(self.client, self.run_id, status, end_time=end_time)

    @property
    def num_points(self) -> int:
        return sum(map(len, self.present.values()))

    def upload(self, path: Path, *, folder: Path) -> None:
        """Upload a file of the run folder, into the same subfolder."""
        self.client.log_artifact(self.run_id, str(path), _place(path, folder))

    def upload_new(self, path: Path, *, folder: Path) -> bool:
        """Upload it unless the store has a file of this name and size; whether it was done."""
        place = _place(path, folder)
        name = path.name if place is None else f"{place}/{path.name}"
        stored = {
            each.path: each.file_size for each in self.client.list_artifacts(self.run_id, place)
        }
        if stored.get(name) == path.stat().st_size:
            return False
        self.upload(path, folder=folder)
        return True


def _place(path: Path, folder: Path) -> str | None:
    place = path.relative_to(folder).parent if path.is_relative_to(folder) else Path()
    return None if place == Path() else place.as_posix()


def open_run(description: RunDescription, *, say: Say) -> MlflowRun:
    """Find or create the run of this folder, set it RUNNING, and write its description.

    A run that it replaces and that was left open is closed.
    """
    client = open_client(description.uri, say=say)
    params = flatten_params(description.params)
    tags = dict(description.record.tags)
    tags["vitscale.run_folder"] = str(description.folder.absolute())
    known = linked_run(client, description.folder, uri=description.uri)
    tags |= _resume_tags(known, params, description)
    if known is not None and not _is_same(known, params, tags, description):
        say(f"MLflow run {known.info.run_id} belongs to a different earlier run; creating another")
        tags["vitscale.replaces_run"] = known.info.run_id
        _close(client, known)
        known = None
    tags = clean_tags(tags)
    if known is None:
        created = client.create_run(
            experiment_id(client, description.record.experiment, uri=description.uri),
            run_name=description.record.name,
            start_time=int(description.start_time * 1000),
            tags=tags | {STATUS_TAG: "running"},
        )
        run = MlflowRun(
            client=client, run_id=created.info.run_id, experiment=created.info.experiment_id
        )
        write_link(
            description.folder,
            uri=description.uri,
            experiment=description.record.experiment,
            run_id=created.info.run_id,
        )
    else:
        run = reopened(client, known)
        run.set_status("RUNNING")
        log_tags(client, run.run_id, tags)
    describe(run, known, params, description)
    return run


def clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: redact(value)[:MAX_TAG_CHARS] for key, value in tags.items()}


def reopened(client: MlflowClient, known: Any) -> MlflowRun:
    run = MlflowRun(client=client, run_id=known.info.run_id, experiment=known.info.experiment_id)
    run.present = {
        key: {point.step for point in client.get_metric_history(run.run_id, key)}
        for key in known.data.metrics
        if not key.startswith(NODE_PREFIX)
    }
    return run


def describe(
    run: MlflowRun, known: Any | None, params: dict[str, str], description: RunDescription
) -> None:
    """Write what the store lacks: parameters, description, datasets, configuration."""
    client, run_id = run.client, run.run_id
    _log_params(client, run_id, params, {} if known is None else known.data.params)
    # A description that somebody edited stays.
    if description.record.note and (known is None or NOTE_TAG not in known.data.tags):
        client.set_tag(run_id, NOTE_TAG, redact(description.record.note)[:MAX_NOTE_CHARS])
    _log_datasets(run, known, description.record.datasets)
    if CONFIG_ARTIFACT not in {file.path for file in client.list_artifacts(run_id)}:
        client.log_text(run_id, redact_yaml(description.config_yaml), CONFIG_ARTIFACT)


def _log_datasets(run: MlflowRun, known: Any | None, datasets: Sequence[DatasetFacts]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    stored = () if known is None else known.inputs.dataset_inputs
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
        run.client.log_inputs(run.run_id, datasets=inputs)


def _close(client: MlflowClient, known: Any) -> None:
    """End a run that was left open, at the time of its last point."""
    if known.info.status not in ("RUNNING", "SCHEDULED"):
        return
    keys = [key for key in known.data.metrics if not key.startswith(NODE_PREFIX)]
    points = client.get_metric_history(known.info.run_id, keys[0]) if keys else []
    last = max((point.timestamp for point in points), default=known.info.start_time)
    set_status(client, known.info.run_id, "KILLED", end_time=last / 1000)


def _is_same(
    known: Any, params: dict[str, str], tags: dict[str, str], description: RunDescription
) -> bool:
    """Whether to continue the folder's MLflow run.

    From a checkpoint: always. From step 0: only an unfinished run with the same configuration and
    commit, which reproduces the same points; points in MLflow cannot be replaced.
    """
    if description.resume_step > 0:
        return True
    commit = "mlflow.source.git.commit"
    return (
        known.info.status != "FINISHED"
        and known.data.params == params
        and known.data.tags.get(commit) == tags.get(commit)
    )


def _resume_tags(
    known: Any | None, params: dict[str, str], description: RunDescription
) -> dict[str, str]:
    """Tags with what a resume changed, since parameters of an MLflow run cannot change."""
    if description.resume_step == 0:
        return {}
    tags = {"vitscale.resumed_from_step": str(description.resume_step)}
    if known is None:
        if read_link(description.folder) is not None:
            tags["vitscale.restored_from_journal"] = "true"
        return tags
    return tags | changed_params(known.data.params, params)


def changed_params(stored: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    changed = [
        f"{key}: {stored[key]} -> {value}"
        for key, value in params.items()
        if key in stored and stored[key] != value
    ]
    return {"vitscale.changed_params": "; ".join(changed)} if changed else {}


def log_tags(client: MlflowClient, run_id: str, tags: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(key, value) for key, value in tags.items()]
    for i in range(0, len(entries), PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=entries[i : i + PARAMS_PER_BATCH])


def _log_params(
    client: MlflowClient, run_id: str, params: dict[str, str], stored: dict[str, str]
) -> None:
    from mlflow.entities import Param

    entries = [Param(key, value) for key, value in params.items() if key not in stored]
    for i in range(0, len(entries), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=entries[i : i + PARAMS_PER_BATCH])


def upload_to_linked_run(folder: Path, files: Sequence[Path], *, say: Say) -> bool:
    """Upload files to the MLflow run that a run folder is linked to; whether it was done.

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
            client.log_artifact(link["run_id"], str(path))
    except Exception as error:
        lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
        say(f"warning: not uploaded to MLflow ({lines[0][:200]})")
        return False
    say(f"uploaded to MLflow run {link['run_id']}")
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run read from MLflow."""

    run_id: str
    name: str
    status: str
    params: dict[str, str]
    rows: Sequence[Row]


def find_stored_run(uri: str, name_or_id: str, *, say: Say) -> tuple[StoredRun | None, list[str]]:
    """Find a run by id or name (the newest of that name). Returns (run, all names)."""
    client, found = _search(uri, "", SEARCHED_RUNS, say=say)
    for run in found:
        if name_or_id in (run.info.run_id, run.info.run_name):
            return _stored(client, run), []
    return None, sorted({run.info.run_name for run in found})


def find_stored_runs(uri: str, query: str, *, say: Say) -> list[StoredRun]:
    """Runs that MLflow's filter finds, newest first, at most FILTERED_RUNS."""
    client, found = _search(uri, query, FILTERED_RUNS, say=say)
    return [_stored(client, run) for run in found]


def _search(uri: str, query: str, limit: int, *, say: Say) -> tuple[MlflowClient, Sequence[Any]]:
    client = open_client(uri, say=say)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    order = ["attributes.start_time DESC"]
    return client, client.search_runs(
        experiments, filter_string=query, order_by=order, max_results=limit
    )


def _stored(client: MlflowClient, run: Any) -> StoredRun:
    """The run with the history of its metrics."""
    by_step: dict[int, tuple[float, dict[str, float]]] = {}
    points = (
        point
        for key in run.data.metrics
        if not key.startswith(NODE_PREFIX)
        for point in client.get_metric_history(run.info.run_id, key)
    )
    for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
        by_step.setdefault(point.step, (point.timestamp / 1000, {}))
        by_step[point.step][1][present_name(point.key)] = point.value
    return StoredRun(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status,
        params=dict(run.data.params),
        rows=[Row(step=step, time=at, metrics=each) for step, (at, each) in by_step.items()],
    )
