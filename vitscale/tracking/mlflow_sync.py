"""Keep MLflow equal to run folders: `MlflowRun` sends what the store lacks; `stored_runs` reads it.

A run folder holds all that MLflow is told: metrics in the journal, settings in config.yaml, tags in
events/ with an id, by which its MLflow run is found. So sending may be interrupted anywhere,
and repeated: by the thread of a training's tracker, by `compare.py sync` for any folder.

Every call of MLflow may block or raise; none belongs in a training loop. mlflow is imported on
first use: it takes two seconds.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from vitscale.config.errors import UserError
from vitscale.config.loader import read_values, shown_path
from vitscale.config.redaction import (
    flatten_params,
    printable,
    redact,
    shared_yaml,
    short_reason,
)
from vitscale.distributed.atomic_files import Say, or_warn
from vitscale.distributed.events import EVENTS_NAME, append_event, read_events
from vitscale.tracking.journal import JOURNAL_NAME, Row, read_rows
from vitscale.tracking.run_files import safe_files
from vitscale.tracking.settings import sqlite_path

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
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "30",
}
CONFIG_NAME = "config.yaml"
# Events of a run folder: a start of a run, and its end.
TRACKED = "tracked"
ENDED = "ended"
ID_TAG = "vitscale.tracking_id"
FOLDER_TAG = "vitscale.run_folder"
# Tag of a copied run folder: the id of the run that it is a copy of.
COPY_TAG = "vitscale.copied_from"
# Name, number of images and fingerprint of the images of training and of evaluation.
DATA_TAG = "vitscale.data"
VAL_DATA_TAG = "vitscale.val_data"
# The version of the code.
CODE_TAG = "vitscale.code"
# MLflow's own metrics of nodes, which are not in the journal.
SYSTEM_PREFIX = "system/"
# Counts of what may never happen. MLflow has them from the first event on.
EVENT_COUNTS = ("train/skipped_steps", "vitals/unreadable")
# Files of a run folder that are sent at its end.
FILES = "source-*.diff results.* pictures/*.png evaluation/**/*.*".split()
# Beside a local database.
ARTIFACTS_FOLDER = "mlflow-artifacts"
# Where a server may let this machine write. Its own `runs:` and `models:` may lead to a folder.
REMOTE_ARTIFACTS = "mlflow-artifacts http https s3 gs wasbs abfss hdfs dbfs".split()
MAX_FILE_BYTES = 256 << 20
# Metrics of the process, which no resume repeats.
VITALS_PREFIX = "vitals/"
ROWS_PER_ROUND = 200

Status = Literal["RUNNING", "PAUSED", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What MLflow is told of a run beside metrics and configuration, and how the run ended."""

    tracking_id: str
    """A tag of the MLflow run, the same in all attempts that continue each other."""
    name: str
    experiment: str = "vitscale"
    uri: str | None = None
    """The MLflow store, absolute and without credentials; None: journal only."""
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Description of the run, in Markdown."""
    origin: str | None = None
    """Run folder, or a checkpoint in one, that the weights come from."""
    folder: str = ""
    """The run folder at this start, absolute; empty in runs of earlier versions."""
    made_with: str = ""
    """Hash of configuration and code."""
    time: float = 0.0
    """When it started, unix seconds."""
    status: Status = "RUNNING"
    """A process that was killed outright leaves RUNNING."""
    ended: float | None = None
    """Unix seconds; None while it is RUNNING."""


READ_RECORD = TypeAdapter(RunRecord)


def read_record(folder: Path) -> RunRecord | None:
    """The record of the last start of a run; None if there is none."""
    record = None
    for row in read_events(folder):
        # Somebody else may have written a row, with any keys and values.
        with suppress(KeyError, ValidationError):
            if row["event"] == TRACKED:
                # Versions differ in their fields: unknown ones are left out, others have defaults.
                record = READ_RECORD.validate_python(row)
            elif row["event"] == ENDED and record is not None:
                record = replace(record, status=row["status"], ended=row["time"])
    return record


def own_record(folder: Path) -> RunRecord | None:
    """The record of a run folder as itself: of a copy, whose original is there, with another id.

    A folder that was only moved keeps its id. Nothing is written, so the id follows from the place.
    """
    record = read_record(folder)
    if record is None or not _is_copy(
        folder, record.folder, tracking_id=record.tracking_id
    ):
        return record
    return _as_copy(record, folder)


def _as_copy(record: RunRecord, folder: Path) -> RunRecord:
    # The same folder gives the same id at every start, and no other folder does.
    text = f"{record.tracking_id}\0{folder.resolve()}"
    return replace(
        record,
        tracking_id=sha256(text.encode()).hexdigest()[:32],
        name=folder.resolve().name,
        tags={**record.tags, COPY_TAG: record.tracking_id},
    )


def _is_copy(folder: Path, origin: str, *, tracking_id: str) -> bool:
    """Whether another folder, `origin`, has this run, too."""
    with suppress(OSError):
        # Links and mounts may name the same folder in another way.
        if origin and not os.path.samefile(origin, folder):
            original = read_record(Path(origin))
            return original is not None and original.tracking_id == tracking_id
    return False


def prepare() -> None:
    """Import mlflow, with our defaults. In a training not by a thread: imports may interfere."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow.tracking  # noqa: F401

    # Failures are raised and reported once; these loggers would repeat them.
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def open_client(uri: str) -> MlflowClient:
    """A client of an absolute URI. Creates a missing SQLite database."""
    prepare()
    from mlflow.tracking import MlflowClient

    database = sqlite_path(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    # One process at a time, since first uses race to create tables.
    with open(database.with_name(f".{database.name}.lock"), "ab") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        return MlflowClient(tracking_uri=uri)


def _find(client: MlflowClient, query: str, *, limit: int) -> list[Any]:
    """Runs that MLflow's filter finds in all experiments, newest first."""
    runs: list[Any] = []
    newest = ["attributes.start_time DESC"]
    token: str | None = None
    seen: set[str] = set()
    while True:
        page = client.search_experiments(page_token=token)
        ids = [experiment.experiment_id for experiment in page]
        if ids:
            runs += client.search_runs(ids, query, max_results=limit, order_by=newest)
        token = page.token
        # A server that repeats itself would never end.
        if not token or token in seen:
            break
        seen.add(token)

    # Each page of experiments is sorted by itself, so all pages are sorted together again.
    runs.sort(key=lambda run: run.info.start_time or 0, reverse=True)
    return runs[:limit]


def _find_by_id(client: MlflowClient, tracking_id: str) -> Any | None:
    """The run with this tag, whichever experiment it was moved to."""
    runs = _find(client, f"tags.`{ID_TAG}` = {tracking_id!r}", limit=1)
    return next(iter(runs), None)


def chart_page(uri: str, experiment: str) -> str:
    """Where to see the charts of an experiment: its address, for a database with the command.

    uri: absolute. experiment: its id. MLflow 3 starts in its view for generative models otherwise.
    """
    page = (
        f"#/experiments/{quote(experiment, safe='')}/runs"
        "?workflowType=machine_learning&compareRunsMode=CHART"
    )
    if uri.startswith("http"):
        return f"{redact(uri).rstrip('/')}/{page}"

    store = redact(uri)
    database = sqlite_path(uri)
    if database is not None:
        store = f"sqlite:///{shown_path(database)}"
    command = f"mlflow ui --backend-store-uri {shlex.quote(store)}"
    return f"{command}, then open\n  http://127.0.0.1:5000/{page}"


# ---- sending ----------------------------------------------------------------------------------


class RunReader:
    """A run folder, for a store outside. After an error, open another one."""

    run_id: str
    page: str
    """Where to see it, or how."""
    num_points = num_files = 0

    def __init__(self, folder: Path) -> None:
        record = own_record(folder)
        # Somebody may have copied the journal and the configuration alone.
        if record is None:
            record = RunRecord(
                tracking_id=str(folder.absolute()), name=folder.resolve().name
            )
        self.folder = folder
        self.record = record
        self.config = read_values(folder / CONFIG_NAME)

        self._offset = 0
        times = (row.time for row, _ in read_rows(folder / JOURNAL_NAME))
        self.started = next(times, record.time)

    def new_rows(self) -> Iterator[Row]:
        """Lines of the journal that were not read before."""
        for row, offset in read_rows(self.folder / JOURNAL_NAME, offset=self._offset):
            self._offset = offset
            yield row

    def sync(self, status: Status, *, ended: float | None = None) -> None:
        """Send what the store lacks: points and, at the end of the run, status and files.

        ended: unix seconds; None: now.
        """
        raise NotImplementedError


class MlflowRun(RunReader):
    """The MLflow run of a run folder, found or created."""

    def __init__(
        self, folder: Path, uri: str, *, experiment: str | None = None, say: Say
    ) -> None:
        """uri: absolute. experiment: of a new run; None: the one that the folder names."""
        from mlflow.entities import Param, RunTag

        super().__init__(folder)
        self.uri = uri
        self._say = say
        client = open_client(uri)
        self.client = client
        experiment = experiment or self.record.experiment

        run = _find_by_id(client, self.record.tracking_id)
        if run is not None and not self._is_ours(run):
            self.record = _as_copy(self.record, folder)
            run = _find_by_id(client, self.record.tracking_id)
            say(f"MLflow: another folder continues this run; {folder} is a new one")

        record = self.record
        if run is None:
            run = client.create_run(
                _experiment_id(client, experiment, uri=uri),
                run_name=record.name,
                start_time=int(self.started * 1000),
                tags={ID_TAG: record.tracking_id, "mlflow.note.content": record.note},
            )
        self.run_id = run.info.run_id
        self.page = chart_page(uri, run.info.experiment_id)
        self._artifact_uri = run.info.artifact_uri

        tags = {**record.tags, **_origin_tags(client, record)}
        tags[FOLDER_TAG] = str(folder.resolve())
        # Parameters of an MLflow run cannot change.
        new_params = [
            Param(key, value)
            for key, value in flatten_params(self.config).items()
            if key not in run.data.params
        ]
        changed = tags.items() - run.data.tags.items()
        changed_tags = [RunTag(key, value) for key, value in changed]
        client.log_batch(self.run_id, params=new_params, tags=changed_tags)
        # Datasets that the run has already are not added again.
        client.log_inputs(self.run_id, _datasets(record.tags))

        self._shown: str = run.info.status
        # Points up to these steps are there already, unless an attempt was lost.
        self._last_step = {metric.key: metric.step for metric in run.data._metric_objs}
        self._lost = self._lost_points(run)

    def _is_ours(self, run: Any) -> bool:
        """Whether the points of an MLflow run are those of this folder, and of no other one.

        It was another folder's if that one still has the run, or if its last points are not in
        this journal: then two folders with one id went on, and cannot see each other.
        """
        place = run.data.tags.get(FOLDER_TAG, "")
        # The path may have been recorded with or without its links resolved; old runs have none.
        here = (str(self.folder.resolve()), str(self.folder.absolute()), "")
        if place in here:
            return True
        if _is_copy(self.folder, place, tracking_id=self.record.tracking_id):
            return False
        return not self._last_elsewhere(run)

    def sync(self, status: Status, *, ended: float | None = None) -> None:
        self._send_points()
        # MLflow has no state for a run that waits to be resumed; SCHEDULED comes closest.
        shown = "SCHEDULED" if status == "PAUSED" else status
        if shown != self._shown:
            if status in ("RUNNING", "PAUSED"):
                self.client.update_run(self.run_id, status=shown)
            else:
                moment = None if ended is None else int(ended * 1000)
                self.client.set_terminated(self.run_id, status=shown, end_time=moment)
            self._shown = shown
        if status != "RUNNING":
            self._send_files()

    def _last_elsewhere(self, run: Any) -> set[str]:
        """Metrics whose last point in MLflow is not in this journal, by step and time."""
        last = {
            (point.key, point.step, point.timestamp)
            for point in run.data._metric_objs
            if not point.key.startswith(SYSTEM_PREFIX)
        }
        for row, _ in read_rows(self.folder / JOURNAL_NAME):
            # Points are compared by their time, too: two folders may have reached the same step.
            last -= {(key, row.step, int(row.time * 1000)) for key in row.metrics}
        return {key for key, _, _ in last}

    def _lost_points(self, run: Any) -> dict[tuple[str, int], float]:
        """What MLflow has of metrics that an attempt logged beyond the checkpoint, and lost."""
        lost: dict[tuple[str, int], float] = {}
        for key in self._last_elsewhere(run):
            # They measure the machine, so a second attempt does not repeat them.
            if key.startswith(VITALS_PREFIX):
                continue
            history = self.client.get_metric_history(self.run_id, key)
            # The later of two points at a step counts.
            for point in sorted(history, key=lambda point: point.timestamp):
                lost[key, point.step] = _as_logged(point.value)
        return lost

    def _is_new(self, key: str, step: int, value: float) -> bool:
        """Whether MLflow lacks a point, or has another value from an attempt that was lost."""
        if step > self._last_step.get(key, -1):
            # A count of 0 is left out until the first event, since most runs never have one.
            return bool(value) or key in self._last_step or key not in EVENT_COUNTS
        lost = self._lost.get((key, step))
        # As texts, since NaN is unlike itself.
        return lost is not None and str(lost) != str(value)

    def _send_points(self) -> None:
        """Send each metric's points behind its last step. In order, so that none is lost."""
        from mlflow.entities import Metric

        rows = self.new_rows()
        while chunk := list(itertools.islice(rows, ROWS_PER_ROUND)):
            points = []
            repeated_steps = []
            for row in chunk:
                for key, value in row.metrics.items():
                    if not self._is_new(key, row.step, value):
                        continue
                    moment = int(row.time * 1000)
                    points.append(Metric(key, value, moment, row.step))

                    last_step = self._last_step.get(key, -1)
                    if row.step <= last_step:
                        repeated_steps.append(row.step)
                    self._last_step[key] = max(row.step, last_step)

            # Remembered only in this object: after an error another one asks MLflow what arrived.
            self.client.log_batch(self.run_id, metrics=points)
            self.num_points += len(points)
            if repeated_steps:
                self._say(
                    f"MLflow: steps {min(repeated_steps)} to {max(repeated_steps)} were trained "
                    "again, with other values; it has both, the last one counts"
                )

    def _send_files(self) -> None:
        """Send files that the store lacks or has in another size. A failure is a warning."""
        root = self.folder.resolve()
        paths = [*safe_files(root, FILES, max_bytes=MAX_FILE_BYTES, say=self._say)]
        try:
            artifacts = self.artifacts()
            stored: dict[str, int | None] = {}
            # One listing per folder, instead of a request per file.
            for place in {path.parent for path in paths} | {root}:
                name = None
                if place != root:
                    name = place.relative_to(root).as_posix()
                for artifact in artifacts.list_artifacts(name):
                    stored[artifact.path] = artifact.file_size

            for path in paths:
                name = path.relative_to(root).as_posix()
                if stored.get(name) != path.stat().st_size:
                    artifacts.log_artifact(str(path), name.rpartition("/")[0] or None)
                    self.num_files += 1

            # The configuration is sent as others may see it, without secrets.
            if CONFIG_NAME not in stored:
                with TemporaryDirectory() as temporary:
                    path = Path(temporary, CONFIG_NAME)
                    path.write_text(shared_yaml(self.config), encoding="utf-8")
                    artifacts.log_artifact(str(path))
                self.num_files += 1
        except Exception as error:
            self._say(
                f"warning: files were not uploaded to MLflow ({short_reason(error)})"
            )

    def artifacts(self) -> Any:
        """MLflow's store of this run's files. Raises UserError where a server names a folder here.

        The place is asked for once: a server could name another one after the check.
        """
        from mlflow.store.artifact.artifact_repository_registry import (
            get_artifact_repository,
        )

        place = self._artifact_uri
        is_server = urlsplit(self.uri).scheme in ("http", "https", "databricks")
        if is_server and urlsplit(place).scheme not in REMOTE_ARTIFACTS:
            raise UserError(
                f"the server {redact(self.uri)} wants files at {place!r}, which it must not choose",
                allowed=f"{', '.join(f'{name}:' for name in REMOTE_ARTIFACTS)}",
                next_step="start it with --serve-artifacts, without a folder as artifact root",
            )
        return get_artifact_repository(place, tracking_uri=self.uri)

    def watch_node(self) -> SystemMetricsMonitor:
        """Send the use of CPU, memory, disk, network and GPUs of this node."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        # Without an id of the node, which would put these charts before all others.
        monitor = SystemMetricsMonitor(
            self.run_id, resume_logging=True, tracking_uri=self.uri
        )
        monitor.start()
        return monitor


def _as_logged(stored: float) -> float:
    """MLflow's databases have the largest number in place of infinity."""
    if abs(stored) == sys.float_info.max:
        return math.copysign(math.inf, stored)
    return stored


def _origin_tags(client: MlflowClient, record: RunRecord) -> dict[str, str]:
    """Name the run that the weights come from, if this store has it.

    It is the parent of its evaluations alone: charts leave children out at first.
    """
    if record.origin is None:
        return {}
    path = Path(record.origin)
    # The origin may be the run's folder, or a checkpoint two levels below it.
    source = own_record(path) or own_record(path.parent.parent)
    run = None
    if source is not None:
        run = _find_by_id(client, source.tracking_id)
    if run is None:
        return {}

    tag = "vitscale.init_run_id"
    if record.tags.get("vitscale.stage") == "evaluate":
        tag = "mlflow.parentRunId"
    return {tag: run.info.run_id}


def _datasets(tags: Mapping[str, str]) -> list[Any]:
    """The training and the evaluated images, as MLflow's datasets."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for key, context in ((DATA_TAG, "training"), (VAL_DATA_TAG, "evaluation")):
        # Several sets of shards may be mixed; tars without an index have no fingerprint.
        for text in filter(None, tags.get(key, "").split("; ")):
            facts = text.split(", ")
            dataset = Dataset(facts[0], facts[-1], "local", text)
            found.append(
                DatasetInput(dataset, [InputTag("mlflow.data.context", context)])
            )
    return found


def _experiment_id(client: MlflowClient, name: str, *, uri: str) -> str:
    """Id of the experiment, created if needed."""
    from mlflow.exceptions import MlflowException

    # By default MLflow puts artifacts into ./mlruns of the current folder.
    location = None
    database = sqlite_path(uri)
    if database is not None:
        location = (database.parent / ARTIFACTS_FOLDER).as_uri()

    # Created first and looked for then: another process may create it at any time.
    with suppress(MlflowException):
        return client.create_experiment(name, artifact_location=location)
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return experiment.experiment_id


def upload(
    folder: Path, files: Sequence[Path], *, place: str | None = None, say: Say
) -> None:
    """Upload files to the MLflow run of a run folder, if the run names a store.

    place: folder among the run's artifacts; None: the top.
    Says what was done. A failure is said too and not raised: the files themselves are on disk.
    """
    record = read_record(folder)
    if record is None or record.uri is None:
        return

    try:
        run = MlflowRun(folder, record.uri, say=say)
        run.sync(record.status, ended=record.ended)
        artifacts = run.artifacts()
        for path in files:
            artifacts.log_artifact(str(path), place)
        if files:
            say(f"uploaded to MLflow run {printable(run.run_id)}")
    except Exception as error:
        # The files stay on disk, so a server that is down costs nothing.
        say(f"warning: not uploaded to MLflow ({short_reason(error)})")


def close_run(folder: Path, status: Status, *, say: Say) -> None:
    """Record, here and in MLflow, how a run ended whose process was killed and could not."""
    record = read_record(folder)
    if record is not None and record.ended is None:
        with or_warn(folder / EVENTS_NAME, say):
            append_event(folder, ENDED, {"status": status})
        upload(folder, (), say=say)


# ---- reading ----------------------------------------------------------------------------------


def stored_runs(uri: str, query: str, *, limit: int) -> Iterator[tuple[Any, list[Row]]]:
    """MLflow's runs that its filter finds, newest first, with the metrics of the training."""
    client = open_client(uri)
    for run in _find(client, query, limit=limit):
        points: list[Any] = []
        for key in run.data.metrics:
            if not key.startswith(SYSTEM_PREFIX):
                points += client.get_metric_history(run.info.run_id, key)

        # The later of two points at a step counts.
        rows: dict[int, Row] = {}
        for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
            new_row = Row(step=point.step, time=point.timestamp / 1000, metrics={})
            row = rows.setdefault(point.step, new_row)
            row.metrics[point.key] = _as_logged(point.value)
        yield run, list(rows.values())


def origin_line(tags: Mapping[str, str], *, time_s: float) -> str:
    """When, from which commit, on which data and by whom a run was made, in one line."""
    parts = [time.strftime("%Y-%m-%d", time.localtime(time_s))]
    if code := tags.get(CODE_TAG):
        parts.append(f"code {code}")
    if data := tags.get(DATA_TAG):
        parts.append(data)
    if user := tags.get("mlflow.user"):
        parts.append(f"by {user}")
    return "; ".join(parts)
