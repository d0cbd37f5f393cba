"""A run folder copied into a store has the same content there, however often."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.mlflow_store import log_steps, points, query, tags_of
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_run import Copied, copy_run
from vitscale.tracking.run_facts import DatasetFacts, RunDescription, read_record
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

DATASET = DatasetFacts(
    name="digits/train", digest="d" * 64, source="shards", context="training",
    num_samples=7, num_classes=2,
)  # fmt: skip


@pytest.fixture
def folder(open_tracker: Callable[..., Tracker], tmp_path: Path) -> Path:
    """Of a finished run that only has its journal."""
    with open_tracker(
        settings=TrackingSettings(uri=None, experiment="copies"),
        tags={"mlflow.parentRunId": "e" * 32},
        note="a note",
        datasets=[DATASET],
    ) as tracker:
        log_steps(tracker, range(1, 300))
        picture = tmp_path / "run/pictures/a.png"
        picture.parent.mkdir()
        picture.write_bytes(b"a picture")
        tracker.artifact(picture)
    return tmp_path / "run"


def copy(folder: Path, database: Path, *, note: str | None = None, **changes: Any) -> Copied:
    record = read_record(folder)
    assert record is not None and record.ended is not None and record.status == "FINISHED"
    if note is not None:
        record = record.model_copy(update={"note": note})
    first = next(read_rows(folder / "journal.jsonl"))[0]
    description = RunDescription(
        folder=folder,
        uri=f"sqlite:///{database}",
        record=record,
        params={"optim": {"lr": 0.1}},
        config_yaml="optim: {lr: 0.1}\n",
        start_time=first.time,
    )
    arguments: dict[str, Any] = {
        "files": [folder / name for name in record.files],
        "status": record.status,
        "ended": record.ended,
        "say": lambda text: None,
    }
    return copy_run(description, **(arguments | changes))


def content(database: Path, run_id: str) -> list[Any]:
    """Everything that the store has of a run."""
    with sqlite3.connect(database) as connection:
        tables = [
            connection.execute(f"select * from {table} where run_uuid = ?", [run_id]).fetchall()
            for table in ("runs", "metrics", "params", "tags")
        ]
        inputs = "select * from inputs join input_tags using (input_uuid) where destination_id = ?"
        tables.append(connection.execute(inputs, [run_id]).fetchall())
    files = database.parent / f"mlflow-artifacts/{run_id}"
    tables.append([(str(path), path.stat().st_mtime_ns) for path in files.rglob("*")])
    return [sorted(map(repr, rows)) for rows in tables]


def test_a_copy_is_complete_and_made_once(folder: Path, database: Path) -> None:
    first = copy(folder, database)
    assert (first.num_points, first.num_files) == (2 * 299, len(read_record(folder).files))  # type: ignore[union-attr]  # it has one
    before = content(database, first.run.run_id)
    again = copy(folder, database)
    assert (again.run.run_id, again.num_points, again.num_files) == (first.run.run_id, 0, 0)
    assert content(database, first.run.run_id) == before
    moments = query(database, "select timestamp from metrics where run_uuid = ?", first.run.run_id)
    rows = [row for row, _ in read_rows(folder / "journal.jsonl")]
    assert {moment for (moment,) in moments} == {int(row.time * 1000) for row in rows}
    sql = "select status, start_time from runs where run_uuid = ?"
    assert query(database, sql, first.run.run_id) == [("FINISHED", int(rows[0].time * 1000))]
    tags = tags_of(database, first.run.run_id)
    assert tags["mlflow.note.content"] == "a note" and tags["vitscale.stage"] == "pretrain"
    assert "mlflow.parentRunId" not in tags  # which this store does not have
    picture = database.parent / f"mlflow-artifacts/{first.run.run_id}/artifacts/pictures/a.png"
    assert picture.read_bytes() == b"a picture"


def test_a_note_that_somebody_edited_stays(folder: Path, database: Path) -> None:
    run_id = copy(folder, database, note="n" * 9000).run.run_id
    assert tags_of(database, run_id)["mlflow.note.content"] == "n" * 8000
    query(
        database,
        "update tags set value = 'mine' where key = 'mlflow.note.content' and run_uuid = ?",
        run_id,
    )
    copy(folder, database)
    assert tags_of(database, run_id)["mlflow.note.content"] == "mine"


def test_an_interrupted_copy_is_completed(folder: Path, database: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copy(folder, database, files=[folder / "missing"])
    run_id = copy(folder, database).run.run_id
    assert copy(folder, database).num_points == 0
    assert len(points(database, run_id)) == 2 * 299
    assert query(database, "select status from runs where run_uuid = ?", run_id) == [("FINISHED",)]
    journal = tags_of(database, run_id)["vitscale.journal"]
    assert len(query(database, "select 1 from tags where value = ?", journal)) == 1


def test_a_parent_is_named_by_its_copy(
    folder: Path, database: Path, open_tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    with open_tracker(folder=parent, settings=TrackingSettings(uri=None)) as tracker:
        log_steps(tracker, range(1, 3))
    write_json(parent / "mlflow.json", {"uri": "http://old", "run_id": "e" * 32, "experiment": "a"})
    copied = copy(parent, database)
    child = copy(folder, database)
    assert tags_of(database, child.run.run_id)["mlflow.parentRunId"] == copied.run.run_id


def test_a_tracked_folder_is_copied_onto_its_own_run(
    open_tracker: Callable[..., Tracker], database: Path, tmp_path: Path
) -> None:
    """A process that was killed left it open."""
    tracker = open_tracker(params={"optim": {"lr": 0.1}})
    log_steps(tracker, range(1, 3))
    run_id = tracker.run_id
    tracker.close(status="FINISHED")
    query(database, "update runs set status = 'RUNNING' where run_uuid = ?", str(run_id))
    sql = "update tags set value = 'running' where key = 'vitscale.status' and run_uuid = ?"
    query(database, sql, str(run_id))
    done = copy(tmp_path / "run", database, status="KILLED", ended=1e9)
    assert (done.run.run_id, done.num_points, done.num_files) == (run_id, 0, 0)
    sql = "select status, end_time from runs where run_uuid = ?"
    assert query(database, sql, str(run_id)) == [("KILLED", 10**12)]
