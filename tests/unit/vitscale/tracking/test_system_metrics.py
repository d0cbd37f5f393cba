"""One monitor per node, which ends with the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.mlflow_store import points
from tests.support.waiting import wait_until
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking import system_metrics
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.system_metrics import node_metrics
from vitscale.tracking.tracker import Tracker


def threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return names & {"system-metrics", "SystemMetricsMonitor"}


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_S", 0.05)


def test_a_node_is_watched_until_the_run_ends(
    open_tracker: Callable[..., Tracker], database: Path, tmp_path: Path
) -> None:
    settings = TrackingSettings(uri=f"sqlite:///{database}")
    with open_tracker() as tracker:
        run_id = tracker.run_id
        with node_metrics(tmp_path / "run", settings, is_first_node=True, is_first_of_node=True):
            wait_until(lambda: len(points(database, run_id)) > 0, every_s=0.05)
        assert not threads()
    keys = {key for key, _ in points(database, run_id)}
    assert all(key.startswith("vitals/nodes/") for key in keys)
    assert any(key.endswith("/cpu_utilization_percentage") for key in keys)


@pytest.mark.parametrize(
    ("changes", "is_first_node", "is_first_of_node"),
    [
        ({"system_metrics": False}, True, True),
        ({}, True, False),
        ({}, False, True),  # SQLite is for one node
        ({"uri": None}, True, True),
    ],
)
def test_other_ranks_are_not_watched(
    tmp_path: Path, changes: dict[str, object], is_first_node: bool, is_first_of_node: bool
) -> None:
    settings = TrackingSettings(uri="sqlite:///x.db").model_copy(update=changes)
    with node_metrics(
        tmp_path, settings, is_first_node=is_first_node, is_first_of_node=is_first_of_node
    ):
        assert not threads()


def test_a_dead_server_does_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    uri = "http://127.0.0.1:1"  # nobody listens
    write_json(tmp_path / "mlflow.json", {"uri": uri, "run_id": "e" * 32, "experiment": "a"})
    settings = TrackingSettings(uri=uri)
    with node_metrics(tmp_path, settings, is_first_node=False, is_first_of_node=True):
        assert threads()
        time.sleep(0.2)
