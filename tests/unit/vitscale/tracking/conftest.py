"""A real SQLite store, made once, and trackers of runs in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S
from vitscale.tracking import tracker
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

PARAMS = {"optim": {"lr": 0.001}, "data": {"path": "http://me:hunter2@host/x"}}


@pytest.fixture
def database(mlflow_database: Path, tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return Path(shutil.copy(mlflow_database, tmp_path / "store"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about the waits that are bounded for a training's sake."""
    for name in ("OPEN_WAIT_S", "CLOSE_WAIT_S", "FAILED_CLOSE_WAIT_S"):
        monkeypatch.setattr(tracker, name, PATIENCE_S)


@pytest.fixture
def open_tracker(database: Path, tmp_path: Path) -> Callable[..., Tracker]:
    def open_it(**changes: Any) -> Tracker:
        arguments: dict[str, Any] = {
            "folder": tmp_path / "run",
            "settings": TrackingSettings(uri=f"sqlite:///{database}", system_metrics=False),
            "run_name": "digits",
            "stage": "pretrain",
            "params": PARAMS,
            "tags": {},
            "config_yaml": "path: http://me:hunter2@host/x\nlaunch: {nodes: 2, setup: [x]}\n",
            "resume_step": 0,
            "is_writer": True,
            "say": lambda text: None,
        }
        return Tracker.open(**(arguments | changes))

    return open_it
