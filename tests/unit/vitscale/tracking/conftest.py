"""A real SQLite store, made once, and trackers of runs in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

PARAMS = {"optim": {"lr": 0.001}, "data": {"path": "http://me:hunter2@host/x"}}


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "mlflow.db"  # made once: its first use takes seconds


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
