"""Keep MLflow equal to run folders: `sync` sends what the store lacks; `find_stored_runs` reads it.

A run folder holds all that MLflow is told: metrics in the journal, settings in config.yaml, tags
and the ids of its MLflow runs in events.jsonl. So `sync` may be interrupted anywhere, and called
again: by the thread of a training's tracker after each line, by `compare.py sync` for any folder.

Every call here may block or raise; none belongs in a training loop. mlflow is imported on first
use: it takes two seconds.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from vitscale.config.redaction import redact, short_reason
from vitscale.distributed.events import append_event
from vitscale.distributed.processes import node_name
from vitscale.tracking.journal import JOURNAL_NAME, Row, read_rows
from vitscale.tracking.run_facts import (
    CONFIG_NAME,
    LINKED,
    RunRecord,
    Status,
    flatten_params,
    read_links,
    read_record,
    redact_yaml,
    shared_config,
    sqlite_path,
)

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient

# Defaults for variables that the user has not set. With MLflow's own, 120 s and 7 retries, a call
# can block for 20 minutes. Telemetry would contact a third party from compute nodes.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
STATUS_TAG, CODE_TAG, NOTE_TAG = "vitscale.status", "vitscale.code", "mlflow.note.content"
PARENT_TAG = "mlflow.parentRunId"
# MLflow's own metrics of nodes, which are not in the journal.
SYSTEM_PREFIX = "system/"
SYSTEM_SAMPLE_S, SYSTEM_SAMPLES_PER_POINT = 10.0, 3
# Counts of what may never happen. MLflow has them from the first event on.
EVENT_COUNTS = {"train/skipped_steps", "vitals/unreadable"}
# Files of a run folder that are sent at its end.
FILES = ("source-*.diff", "results.*", "pictures/*.png", "evaluation/**/*.*")
# Beside a local database.
ARTIFACTS_FOLDER = "mlflow-artifacts"
# Limits of MLflow's for one request.
PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000
ROWS_PER_ROUND = 200
MAX_FOUND = 5000

Say = Callable[[str], None]
Entry = TypeVar("Entry")


@dataclass(kw_only=True, slots=True)
class MlflowRun:
    """The MLflow run of a run folder, and what is known to be there."""

    client: Any
    folder: Path
    run_id: str
    experiment: str
    """Its id."""
    status: str
    """The value of STATUS_TAG."""
    last_step: dict[str, int]
    """Of each metric."""
    offset: int = 0
    """Lines of the journal before it are sent."""
    num_points: int = 0
    """Sent so far, as `num_files`."""
    num_files: int = 0


def sync(
    folder: Path,
    uri: str,
    *,
    run: MlflowRun | None = None,
    status: Status,
    ended: float | None = None,
    experiment: str | None = None,
    starts_anew: bool = False,
    say: Say,
) -> MlflowRun:
    """Send what the MLflow run of a folder lacks; find or create the run first.

    uri: absolute. run: the result of an earlier call, to go on from there; after an error, none.
    status, ended: how the run ended, and when (Unix seconds; None: now). Files are sent with any
    status but RUNNING. experiment: of a new run; None: the one that the folder names.
    starts_anew: the training began at step 0. It continues the run of an earlier attempt only if
    that is unfinished and had the same settings and code, since MLflow cannot replace points.
    """
    if run is None:
        run = _open_run(folder, uri, experiment=experiment, starts_anew=starts_anew, say=say)
    _send_points(run)
    if run.status != status.lower():
        _set_status(run.client, run.run_id, status, ended=ended)
        run.status = status.lower()
    if status != "RUNNING":
        _send_files(run, say=say)
    return run


def prepare() -> None:
    """Import mlflow, with our defaults. In a training not by a thread: imports may interfere."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow.tracking  # noqa: F401

    # Failures are raised and reported once; these loggers would repeat them.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def open_client(uri: str, *, say: Say) -> MlflowClient:
    """A client of an absolute URI. Creates a missing SQLite database, with a message."""
    prepare()
    from mlflow.tracking import MlflowClient

    database = sqlite_path(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    import fcntl

    if is_new := not database.exists():
        say(f"creating the MLflow database {database}; the first use takes some seconds")
        database.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    # One process at a time, since first uses race to create tables.
    with open(database.with_name(f".{database.name}.lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        client = MlflowClient(tracking_uri=uri)
    if is_new:
        say(f"MLflow database ready after {time.monotonic() - start:.1f} s")
    return client


def _open_run(
    folder: Path, uri: str, *, experiment: str | None, starts_anew: bool, say: Say
) -> MlflowRun:
    from mlflow.entities import Param, RunTag

    client = open_client(uri, say=say)
    config = _read_config(folder)
    record = read_record(folder) or RunRecord(name=folder.resolve().name)  # a bare copy
    params = flatten_params(config)
    tags = {**record.tags, **_origin_tags(client, record)}
    tags["vitscale.run_folder"] = str(folder.absolute())
    known = _linked_run(client, folder)
    if known is not None and starts_anew and not _is_same(known, params, tags):
        say(f"MLflow run {known.info.run_id} is of another start of this run; creating one")
        if known.info.status in ("RUNNING", "SCHEDULED"):
            _set_status(client, known.info.run_id, "KILLED")
        known = None
    if known is None:
        first = next((row.time for row, _ in read_rows(folder / JOURNAL_NAME)), record.started)
        note = {NOTE_TAG: record.note} if record.note else {}
        known = client.create_run(
            _experiment_id(client, experiment or record.experiment, uri=uri),
            run_name=record.name,
            start_time=int(first * 1000),
            tags=tags | note,
        )
        append_event(folder, LINKED, {"uri": redact(uri), "run_id": known.info.run_id})
    run_id, stored = known.info.run_id, known.data
    for batch in _batches([*tags.items() - stored.tags.items()], PARAMS_PER_BATCH):
        client.log_batch(run_id, tags=[RunTag(*tag) for tag in batch])
    # Parameters of an MLflow run cannot change.
    new = [Param(key, value) for key, value in params.items() if key not in stored.params]
    for each in _batches(new, PARAMS_PER_BATCH):
        client.log_batch(run_id, params=each)
    return MlflowRun(
        client=client,
        folder=folder,
        run_id=run_id,
        experiment=known.info.experiment_id,
        status=stored.tags.get(STATUS_TAG, ""),
        last_step={metric.key: metric.step for metric in stored._metric_objs},
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _is_same(known: Any, params: Mapping[str, str], tags: Mapping[str, str]) -> bool:
    code = known.data.tags.get(CODE_TAG)
    is_finished = known.info.status == "FINISHED"
    return not is_finished and known.data.params == params and code == tags.get(CODE_TAG)


def _origin_tags(client: MlflowClient, record: RunRecord) -> dict[str, str]:
    """Name the run that the weights come from, if this store has it.

    It is the parent of its evaluations alone: charts leave children out at first.
    """
    if record.origin is None:
        return {}
    path = Path(record.origin)
    run = _linked_run(client, path) or _linked_run(client, path.parent.parent)
    if run is None:
        return {}
    is_child = record.tags.get("vitscale.stage") == "evaluate"
    return {PARENT_TAG if is_child else "vitscale.init_run_id": run.info.run_id}


def _linked_run(client: MlflowClient, folder: Path) -> Any | None:
    """The newest run that a folder names and the store has, whatever the address of the store."""
    from mlflow.exceptions import MlflowException

    for link in reversed(read_links(folder)):
        try:
            run = client.get_run(link.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            if run.info.lifecycle_stage == "active":
                return run
    return None


def _experiment_id(client: MlflowClient, name: str, *, uri: str) -> str:
    """Id of the experiment, created if needed. Safe for concurrent processes."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        database = sqlite_path(uri)
        # By default, MLflow puts artifacts into ./mlruns of the current folder.
        location = None if database is None else (database.parent / ARTIFACTS_FOLDER).as_uri()
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise
    return found.experiment_id


def _set_status(
    client: MlflowClient, run_id: str, status: Status, *, ended: float | None = None
) -> None:
    """MLflow has no PAUSED: it is shown as SCHEDULED, and the tag `vitscale.status` says paused."""
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    elif status == "PAUSED":
        client.update_run(run_id, status="SCHEDULED")
    else:
        moment = None if ended is None else int(ended * 1000)
        client.set_terminated(run_id, status=status, end_time=moment)
    client.set_tag(run_id, STATUS_TAG, status.lower())


def _send_points(run: MlflowRun) -> None:
    """Send each metric's points behind its last step. Points are sent in order, so none is lost."""
    from mlflow.entities import Metric

    rows = read_rows(run.folder / JOURNAL_NAME, offset=run.offset)
    while chunk := list(itertools.islice(rows, ROWS_PER_ROUND)):
        points = [
            Metric(key, value, int(row.time * 1000), row.step)
            for row, _ in chunk
            for key, value in _new_points(run, row)
        ]
        for batch in _batches(points, METRICS_PER_BATCH):
            run.client.log_batch(run.run_id, metrics=batch)
        run.num_points += len(points)
        run.offset = chunk[-1][1]


def _new_points(run: MlflowRun, row: Row) -> Iterator[tuple[str, float]]:
    for key, value in row.metrics.items():
        if value == 0 and key in EVENT_COUNTS and key not in run.last_step:
            continue
        if row.step > run.last_step.get(key, -1):
            run.last_step[key] = row.step
            yield key, value


def _send_files(run: MlflowRun, *, say: Say) -> None:
    """Send files that the store lacks or has in another size. A failure is a warning."""
    root = run.folder.resolve()
    found = {path for pattern in FILES for path in root.glob(pattern) if path.is_file()}
    sizes: dict[str | None, dict[str, int]] = {}
    try:
        for path in sorted(path for path in found if path.resolve().is_relative_to(root)):
            name = path.relative_to(root).as_posix()
            place = name.rpartition("/")[0] or None
            if place not in sizes:
                stored = run.client.list_artifacts(run.run_id, place)
                sizes[place] = {each.path: each.file_size for each in stored}
            if sizes[place].get(name) != path.stat().st_size:
                run.client.log_artifact(run.run_id, str(path), place)
                run.num_files += 1
        if CONFIG_NAME not in {each.path for each in run.client.list_artifacts(run.run_id)}:
            shared = yaml.safe_dump(shared_config(_read_config(run.folder)), sort_keys=False)
            run.client.log_text(run.run_id, redact_yaml(shared), CONFIG_NAME)
            run.num_files += 1
    except Exception as error:
        say(f"warning: files were not uploaded to MLflow ({short_reason(error)})")


def _batches(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for i in range(0, len(entries), size):
        yield entries[i : i + size]


def start_monitor(run: MlflowRun, uri: str, *, say: Say) -> SystemMetricsMonitor | None:
    """Send the use of CPU, memory, disk, network and GPUs of this node."""
    try:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            run.run_id,
            sampling_interval=SYSTEM_SAMPLE_S,
            samples_before_logging=SYSTEM_SAMPLES_PER_POINT,
            resume_logging=True,
            node_id=node_name(),
            tracking_uri=uri,
        )
        monitor.start()
    except Exception as error:
        say(f"warning: no system metrics in MLflow ({short_reason(error)})")
        return None
    return monitor


def upload(folder: Path, files: Sequence[Path], *, say: Say, place: str | None = None) -> bool:
    """Upload files to the newest MLflow run of a run folder; whether it was done.

    place: folder among the run's artifacts; None: the top.
    Says what was done. A failure is said too and not raised: the files themselves are on disk.
    """
    links = read_links(folder)
    if not links or not files:
        return False
    link = links[-1]
    database = sqlite_path(link.uri)
    if database is not None and not database.exists():
        say(f"warning: not uploaded to MLflow (there is no {database})")
        return False
    try:
        client = open_client(link.uri, say=say)
        for path in files:
            client.log_artifact(link.run_id, str(path), place)
    except Exception as error:
        say(f"warning: not uploaded to MLflow ({short_reason(error)})")
        return False
    say(f"uploaded to MLflow run {link.run_id}")
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run read from MLflow."""

    run_id: str
    name: str
    status: str
    params: dict[str, str]
    rows: Sequence[Row]
    tags: dict[str, str]


def find_stored_run(uri: str, name_or_id: str) -> StoredRun | None:
    """Find a run by id or name (the newest of that name)."""
    client, found = _search(uri, "", MAX_FOUND)
    for run in found:
        if name_or_id in (run.info.run_id, run.info.run_name):
            return _stored(client, run)
    return None


def find_stored_runs(uri: str, query: str, *, limit: int) -> list[StoredRun]:
    """Runs that MLflow's filter finds, newest first."""
    client, found = _search(uri, query, limit)
    return [_stored(client, run) for run in found]


def _search(uri: str, query: str, limit: int) -> tuple[MlflowClient, Sequence[Any]]:
    client = open_client(uri, say=lambda text: None)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    order = ["attributes.start_time DESC"]
    return client, client.search_runs(
        experiments, filter_string=query, order_by=order, max_results=limit
    )


def _stored(client: MlflowClient, run: Any) -> StoredRun:
    """The run with the history of its metrics, without those of its nodes."""
    keys = [key for key in run.data.metrics if not key.startswith(SYSTEM_PREFIX)]
    points = [p for key in keys for p in client.get_metric_history(run.info.run_id, key)]
    rows: dict[int, Row] = {}
    for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
        row = Row(step=point.step, time=point.timestamp / 1000, metrics={})
        rows.setdefault(point.step, row).metrics[point.key] = point.value
    return StoredRun(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status,
        params=dict(run.data.params),
        rows=list(rows.values()),
        tags=dict(run.data.tags),
    )
