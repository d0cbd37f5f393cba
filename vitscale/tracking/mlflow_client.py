"""Connect to an MLflow store: the client, experiments, the link of a run folder, status.

Leaves out: what a run holds (`mlflow_run`). Every call here may block or raise; none belongs in a
training loop.

mlflow is imported on first use: it takes two seconds, and only one rank needs it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.config.redaction import redact
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking.run_facts import ARTIFACTS_FOLDER, NODE_PREFIX, clean_tags, sqlite_path

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LINK_NAME = "mlflow.json"
STATUS_TAG = "vitscale.status"

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
        location = None if database is None else (database.parent / ARTIFACTS_FOLDER).as_uri()
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise
    return found.experiment_id


def create_run(
    client: MlflowClient,
    *,
    uri: str,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    start_time: float | None = None,
    folder: Path | None,
) -> Any:
    """Create a run, and link it to the folder. start_time: unix seconds; None: now."""
    created = client.create_run(
        experiment_id(client, experiment, uri=uri),
        run_name=name,
        start_time=None if start_time is None else int(start_time * 1000),
        tags=clean_tags(tags),
    )
    if folder is not None:
        link = {"uri": redact(uri), "experiment": experiment, "run_id": created.info.run_id}
        write_json(folder / LINK_NAME, link)
    return created


def set_status(
    client: MlflowClient, run_id: str, status: str, *, end_time: float | None = None
) -> None:
    """Set RUNNING, PAUSED, or a final status with its time (unix seconds; None: now).

    MLflow has no PAUSED: it is shown as SCHEDULED, and the tag `vitscale.status` says paused.
    """
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    elif status == "PAUSED":
        client.update_run(run_id, status="SCHEDULED")
    else:
        moment = None if end_time is None else int(end_time * 1000)
        client.set_terminated(run_id, status=status, end_time=moment)
    client.set_tag(run_id, STATUS_TAG, status.lower())


def linked_run(client: MlflowClient, folder: Path, *, uri: str) -> Any | None:
    """The run named in the folder's link file; None if there is none or it was deleted."""
    link = read_link(folder)
    if link is None or link.get("uri") != redact(uri):
        return None
    return active_run(client, link["run_id"])


def active_run(client: MlflowClient, run_id: str) -> Any | None:
    """The run of this id; None if there is none or it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def tagged_run(client: MlflowClient, tag: str, value: str) -> Any | None:
    """The newest run with this tag, of any experiment."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{tag}` = '{value}'", max_results=1)
    return found[0] if found else None


def metric_points(client: MlflowClient, run: Any) -> Iterator[Any]:
    """Yield every point of a run, without the metrics of its nodes."""
    for key in run.data.metrics:
        if not key.startswith(NODE_PREFIX):
            yield from client.get_metric_history(run.info.run_id, key)


def read_link(folder: Path) -> dict[str, str] | None:
    """Content of `mlflow.json`; None if absent or unreadable."""
    try:
        link = json.loads((folder / LINK_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return link if isinstance(link, dict) and "run_id" in link else None
