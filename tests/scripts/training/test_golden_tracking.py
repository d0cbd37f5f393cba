"""What MLflow has of a run: one run, each step once, with the values of the journal."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import Golden
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import run
from tests.support.waiting import ROOT

pytestmark = pytest.mark.distributed

SETTINGS = (
    *("schedule.steps=8", "tracking.log_every_steps=2", "checkpoint.every_steps=3"),
    *("tracking.system_metrics=false", "evaluate=[{name: classification, every_steps: 4}]"),
)
POINTS = "training/mlflow_points.json"


@pytest.fixture
def folder(mlflow_database: Path) -> Path:
    return mlflow_database.parent


def train(starter: WarmStarter, folder: Path, **how: Any) -> None:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    run(starter, "pretrain/main.py", folder, *SETTINGS, f"tracking.uri={uri}", num_ranks=2, **how)


def sync(folder: Path) -> None:
    """A training waits for MLflow only so long; what is left at its end is sent here."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    command = [sys.executable, "launch/compare.py", "sync", folder / "run", "--uri", uri]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "mlflow.db") as connection:
        return connection.execute(sql).fetchall()


def points(folder: Path) -> list[tuple[str, int, float]]:
    """All but those about speed and memory, which a repeated step measures anew."""
    sql = "select key, step, value from metrics where key not like 'vitals/%' order by key, step"
    return query(folder, sql)


def journal_points(folder: Path) -> set[tuple[str, int, float]]:
    rows = map(json.loads, (folder / "run/journal.jsonl").read_text().splitlines())
    return {
        (key, row["step"], value)
        for row in rows
        for key, value in row.items()
        if key not in ("step", "time") and not key.startswith("vitals/")
    }


def test_points_of_an_uninterrupted_run(
    warm_starter: WarmStarter, folder: Path, golden: Golden
) -> None:
    train(warm_starter, folder)
    sync(folder)
    assert query(folder, "select name, status from runs") == [("tiny", "FINISHED")]
    golden.json(POINTS, points(folder), rel=1e-5)


def test_a_killed_and_resumed_run_is_one_run_with_each_step_once(
    warm_starter: WarmStarter, folder: Path, golden: Golden
) -> None:
    """Killed in step 6, resumed at step 3; the points of step 4 are in MLflow already."""
    train(warm_starter, folder, faults={1: [fault("backward", 12, "lag and kill")]})
    train(warm_starter, folder)
    sync(folder)
    assert query(folder, "select name, status from runs") == [("tiny", "FINISHED")]
    found, written = points(folder), journal_points(folder)
    assert len({(key, step) for key, step, _ in found}) == len(found)
    # Counts of events are sent from the first event on.
    assert not set(found) - written and not {point for point in written - set(found) if point[2]}
    golden.json(POINTS, found, rel=1e-5)
