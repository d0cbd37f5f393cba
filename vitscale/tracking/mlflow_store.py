"""Read runs from an MLflow store, for comparisons.

Leaves out: writing (`mlflow_run`), connections (`mlflow_client`). Every call may block or raise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitscale.tracking.journal import Row
from vitscale.tracking.mlflow_client import Say, metric_points, open_client
from vitscale.tracking.run_facts import DatasetFacts

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FILTERED_RUNS = 50
SEARCHED_RUNS = 5000


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run read from MLflow."""

    run_id: str
    name: str
    status: str
    params: dict[str, str]
    rows: Sequence[Row]
    tags: dict[str, str]
    datasets: tuple[DatasetFacts, ...]


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
    points = metric_points(client, run)
    for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
        by_step.setdefault(point.step, (point.timestamp / 1000, {}))
        by_step[point.step][1][point.key] = point.value
    return StoredRun(
        run_id=run.info.run_id,
        name=run.info.run_name,
        status=run.info.status,
        params=dict(run.data.params),
        rows=[Row(step=step, time=at, metrics=each) for step, (at, each) in by_step.items()],
        tags=dict(run.data.tags),
        datasets=tuple(_datasets(run)),
    )


def _datasets(run: Any) -> Iterator[DatasetFacts]:
    """The data of a run that vitscale has written; data of others has no counts."""
    for each in run.inputs.dataset_inputs:
        with suppress(ValueError):
            yield DatasetFacts(
                name=each.dataset.name,
                digest=each.dataset.digest,
                source=each.dataset.source,
                context=next((tag.value for tag in each.tags), ""),
                **json.loads(each.dataset.profile or "{}"),
            )
