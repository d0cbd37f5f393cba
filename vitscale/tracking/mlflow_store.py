"""Read and write MLflow runs. No other module imports mlflow.

Owns: the client (explicit, no global active run), experiments, the MLflow run of a run folder
across resumes, writing each point once, and reading runs for comparisons.
Leaves out: threads and outages (`delivery`), the journal (`journal`). Every call here may block or
raise; none belongs in a training loop.

mlflow is imported on first use: it takes two seconds, and only one rank needs it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.config.redaction import redact
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking.journal import Row
from vitscale.tracking.run_facts import (
    MAX_TAG_CHARS,
    flatten_params,
    process_tags,
    redact_yaml,
    sqlite_path,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LINK_NAME = "mlflow.json"
CONFIG_ARTIFACT = "config.yaml"
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
SEARCHED_RUNS = 5000

# Defaults for variables that the user has not set. With MLflow's own, 120 s and 7 retries, a call
# can block for 20 minutes. Telemetry would contact a third party from compute nodes.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

Say = Callable[[str], None]


def open_client(uri: str, *, say: Say) -> MlflowClient:
    """A client of an absolute URI. Creates a missing SQLite database, with a message."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    database = sqlite_path(uri)
    is_new = False
    if database is not None and not database.exists():
        is_new = True
        say(f"creating the MLflow database {database}; the first use takes some seconds")
        database.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    from mlflow.tracking import MlflowClient

    # Failures are raised and `delivery` reports them once; these loggers would repeat them.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    client = _locked_client(MlflowClient, uri, database)
    if is_new:
        say(f"MLflow database ready after {time.monotonic() - start:.1f} s")
    return client


def _locked_client(client_type: type[MlflowClient], uri: str, database: Path | None) -> Any:
    """Open the store. SQLite: one process at a time, since first uses race to create tables."""
    if database is None:
        return client_type(tracking_uri=uri)
    import fcntl

    with open(database.with_name(f".{database.name}.lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        return client_type(tracking_uri=uri)


def experiment_id(client: MlflowClient, name: str, *, uri: str) -> str:
    """Id of the experiment, created if needed. Safe for concurrent processes."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        database = sqlite_path(uri)
        # By default, MLflow puts artifacts into ./mlruns of the current folder.
        location = None if database is None else (database.parent / "mlflow-artifacts").as_uri()
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise
    return found.experiment_id


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """Everything needed to find or create the MLflow run of a run folder."""

    folder: Path
    uri: str
    experiment: str
    run_name: str
    params: dict[str, Any]
    tags: dict[str, str]
    config_yaml: str
    resume_step: int
    start_time: float
    """Unix seconds of the first journal line."""


@dataclass(kw_only=True, slots=True)
class MlflowRun:
    """One open MLflow run. `present`: the points in the store, key -> steps."""

    client: Any
    run_id: str
    present: dict[str, set[int]] = field(default_factory=dict)

    def write(self, rows: Iterable[Row]) -> None:
        """Write the points (one key at one step) that the store lacks."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        fresh: list[tuple[str, int]] = []
        for row in rows:
            for key, value in row.metrics.items():
                if row.step not in self.present.get(key, ()):
                    batch.append(Metric(key, value, int(row.time * 1000), row.step))
                    fresh.append((key, row.step))
        for i in range(0, len(batch), METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=batch[i : i + METRICS_PER_BATCH])
        for key, step in fresh:
            self.present.setdefault(key, set()).add(step)

    def set_status(self, status: str) -> None:
        if status == "RUNNING":
            self.client.update_run(self.run_id, status=status)
        else:
            self.client.set_terminated(self.run_id, status=status)

    def upload(self, path: Path) -> None:
        self.client.log_artifact(self.run_id, str(path))


def open_run(description: RunDescription, *, say: Say) -> MlflowRun:
    """Find or create the run of this folder, set it RUNNING, and write its description."""
    client = open_client(description.uri, say=say)
    params = flatten_params(description.params)
    tags = process_tags() | description.tags
    tags["vitscale.run_folder"] = str(description.folder.absolute())
    known = linked_run(client, description.folder, uri=description.uri)
    tags |= _resume_tags(known, params, description)
    if known is not None and not _is_same(known, params, tags, description):
        say(f"MLflow run {known.info.run_id} belongs to a different earlier run; creating another")
        tags["vitscale.replaces_run"] = known.info.run_id
        known = None
    tags = {key: redact(value)[:MAX_TAG_CHARS] for key, value in tags.items()}
    if known is None:
        created = client.create_run(
            experiment_id(client, description.experiment, uri=description.uri),
            run_name=description.run_name,
            start_time=int(description.start_time * 1000),
            tags=tags,
        )
        run = MlflowRun(client=client, run_id=created.info.run_id)
        write_link(
            description.folder,
            uri=description.uri,
            experiment=description.experiment,
            run_id=created.info.run_id,
        )
        stored_params: dict[str, str] = {}
    else:
        run = MlflowRun(client=client, run_id=known.info.run_id)
        run.present = {
            key: {point.step for point in client.get_metric_history(run.run_id, key)}
            for key in known.data.metrics
        }
        stored_params = known.data.params
        run.set_status("RUNNING")
        _log_tags(client, run.run_id, tags)
    _log_params(client, run.run_id, params, stored_params)
    if CONFIG_ARTIFACT not in {file.path for file in client.list_artifacts(run.run_id)}:
        client.log_text(run.run_id, redact_yaml(description.config_yaml), CONFIG_ARTIFACT)
    return run


def linked_run(client: MlflowClient, folder: Path, *, uri: str) -> Any | None:
    """The run named in the folder's link file; None if there is none or it was deleted."""
    from mlflow.exceptions import MlflowException

    link = read_link(folder)
    if link is None or link.get("uri") != redact(uri):
        return None
    try:
        run = client.get_run(link["run_id"])
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def read_link(folder: Path) -> dict[str, str] | None:
    """Content of `mlflow.json`; None if absent or unreadable."""
    try:
        link = json.loads((folder / LINK_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return link if isinstance(link, dict) and "run_id" in link else None


def write_link(folder: Path, *, uri: str, experiment: str, run_id: str) -> None:
    link = {"uri": redact(uri), "experiment": experiment, "run_id": run_id}
    write_json(folder / LINK_NAME, link)


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
    stored = known.data.params
    changed = [
        f"{key}: {stored[key]} -> {value}"
        for key, value in params.items()
        if key in stored and stored[key] != value
    ]
    if changed:
        tags["vitscale.changed_params"] = "; ".join(changed)
    return tags


def _log_tags(client: MlflowClient, run_id: str, tags: dict[str, str]) -> None:
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
    from itertools import chain

    client = open_client(uri, say=say)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(
        experiments, order_by=["attributes.start_time DESC"], max_results=SEARCHED_RUNS
    )
    names = sorted({run.info.run_name for run in found})
    for run in found:
        if name_or_id in (run.info.run_id, run.info.run_name):
            break
    else:
        return None, names
    points = chain.from_iterable(
        client.get_metric_history(run.info.run_id, key) for key in run.data.metrics
    )
    by_step: dict[int, tuple[float, dict[str, float]]] = {}
    for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
        by_step.setdefault(point.step, (point.timestamp / 1000, {}))[1][point.key] = point.value
    rows = [Row(step=step, time=at, metrics=values) for step, (at, values) in by_step.items()]
    return StoredRun(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status,
        params=dict(run.data.params),
        rows=rows,
    ), names
