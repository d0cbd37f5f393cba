"""Log steps to a tracker, and query its SQLite store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from vitscale.tracking.tracker import Tracker


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log({"train/loss": 1 / step, "train/lr": 0.1}, step=step)


def query(database: Path, sql: str, *values: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(sql, values).fetchall()


def tags_of(database: Path, run_id: str | None) -> dict[str, str]:
    return dict(query(database, "select key, value from tags where run_uuid = ?", str(run_id)))


def points(database: Path, run_id: str | None) -> list[tuple[Any, ...]]:
    sql = "select key, step from metrics where run_uuid = ? order by key, step"
    return query(database, sql, str(run_id))
