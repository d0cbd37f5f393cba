"""One MLflow run across attempts, in a real SQLite store, by a tracker or by `sync` alone."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.config.errors import UserError
from vitscale.distributed.events import append_event
from vitscale.tracking import mlflow_sync, run_facts
from vitscale.tracking import tracker as tracker_module
from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_sync import MlflowRun, find_stored_run, sync, upload
from vitscale.tracking.run_facts import read_links, read_record
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.source_version import SourceVersion
from vitscale.tracking.tracker import Tracker, final_status

CONFIG: dict[str, Any] = {
    "optim": {"lr": 0.001},
    "data": {"path": "http://me:hunter2@host/x"},
    "launch": {"nodes": 2, "setup": ["x"]},
}


@pytest.fixture
def database(mlflow_database: Path) -> Path:
    return mlflow_database


@pytest.fixture
def open_tracker(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tracker]:
    # Nothing here is about the waits that are bounded for a training's sake.
    for name in ("CLOSE_WAIT_S", "FAILED_CLOSE_WAIT_S"):
        monkeypatch.setattr(tracker_module, name, PATIENCE_S)
    set_version(monkeypatch, SourceVersion(commit="a" * 40, diff="", untracked=()))

    def open_it(config: dict[str, Any] = CONFIG, **changes: Any) -> Tracker:
        folder = changes.pop("folder", tmp_path / "run")
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        arguments: dict[str, Any] = {
            "settings": TrackingSettings(uri=f"sqlite:///{database}", system_metrics=False),
            "name": "digits",
            "stage": "pretrain",
            "tags": {},
            "resume_step": 0,
            "is_writer": True,
            "say": lambda text: None,
        }
        return Tracker(folder, **(arguments | changes))

    return open_it


def set_version(monkeypatch: pytest.MonkeyPatch, version: SourceVersion) -> None:
    for module in (run_facts, tracker_module):
        monkeypatch.setattr(module, "source_version", lambda: version)


def log_steps(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log({"train/loss": 1 / step, "train/lr": 0.1}, step=step)


def query(database: Path, sql: str, *values: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(sql, values).fetchall()


def run_ids(database: Path) -> list[str]:
    return [run_id for (run_id,) in query(database, "select run_uuid from runs")]


def points(database: Path, run_id: str) -> list[tuple[Any, ...]]:
    sql = "select key, step from metrics where run_uuid = ? order by key, step"
    return query(database, sql, run_id)


def status(database: Path, run_id: str) -> str:
    return str(query(database, "select status from runs where run_uuid = ?", run_id)[0][0])


def tags_of(database: Path, run_id: str) -> dict[str, str]:
    return dict(query(database, "select key, value from tags where run_uuid = ?", run_id))


def artifact(database: Path, run_id: str, name: str) -> Path:
    return database.parent / "mlflow-artifacts" / run_id / "artifacts" / name


def send(folder: Path, database: Path, **how: Any) -> MlflowRun:
    how = {"status": "FINISHED", "ended": 2e9} | how
    return sync(folder, f"sqlite:///{database}", **how, say=lambda text: None)


def test_a_resumed_run_is_one_run_with_each_step_once(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with pytest.raises(SystemExit), open_tracker() as first:
        log_steps(first, range(1, 11))
        raise SystemExit(75)
    (run_id,) = run_ids(database)
    assert status(database, run_id) == "SCHEDULED"
    assert tags_of(database, run_id)["vitscale.status"] == "paused"

    second = open_tracker(resume_step=6)  # the checkpoint was older than the last line
    wait_until(lambda: status(database, run_id) == "RUNNING")
    log_steps(second, range(7, 15))
    second.close(status="FINISHED")
    second.close(status="FAILED")  # does nothing
    assert run_ids(database) == [run_id] and status(database, run_id) == "FINISHED"
    assert points(database, run_id) == [
        (key, step) for key in ("train/loss", "train/lr") for step in range(1, 15)
    ]
    # Finished for good: a new start is another run.
    open_tracker().close(status="FINISHED")
    assert len(run_ids(database)) == 2


def test_a_start_at_step_0_continues_an_unfinished_run_of_the_same_settings_and_code(
    open_tracker: Callable[..., Tracker], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tracker().close(status="PAUSED")
    open_tracker().close(status="PAUSED")
    assert len(run_ids(database)) == 1
    set_version(monkeypatch, SourceVersion(commit="b" * 40, diff="", untracked=()))
    open_tracker().close(status="PAUSED")
    open_tracker(CONFIG | {"optim": {"lr": 1.0}}).close(status="FINISHED")
    found = dict(query(database, "select status, count(*) from runs group by status"))
    assert found == {"KILLED": 2, "FINISHED": 1}


def test_event_counts_appear_with_the_first_event(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        for step, count in enumerate([0, 0, 2, 2, 0], start=1):
            tracker.log({"train/skipped_steps": count, "never": 0}, step=step)
    (run_id,) = run_ids(database)
    every = [("never", step) for step in range(1, 6)]
    assert points(database, run_id) == every + [("train/skipped_steps", n) for n in (3, 4, 5)]


def test_what_a_run_shows_is_without_secrets(
    open_tracker: Callable[..., Tracker],
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    diff = "+  api_key: abc\n+uri: http://me:pw@host/x\n"
    version = SourceVersion(commit="c" * 40, diff=diff, untracked=("vitscale/new.py",))
    set_version(monkeypatch, version)
    uri, said = f"sqlite:///{database}", list[str]()
    settings = TrackingSettings(uri=uri, tags={"team": "a"}, system_metrics=False)
    with open_tracker(
        settings=settings, tags={"model": "B/16"}, note="**What:** http://u:p@h", say=said.append
    ) as tracker:
        log_steps(tracker, range(1, 3))
        pictures = tracker.folder / "pictures"
        pictures.mkdir()
        (pictures / "a.png").write_bytes(b"a picture")
    (run_id,) = run_ids(database)
    tags = tags_of(database, run_id)
    assert (tags["mlflow.runName"], tags["vitscale.stage"]) == ("digits", "pretrain")
    assert (tags["vitscale.job_id"], tags["model"], tags["team"]) == ("4711", "B/16", "a")
    assert tags["mlflow.note.content"] == "**What:** http://h"
    assert tags["mlflow.source.git.commit"] == "c" * 40
    assert tags["mlflow.source.git.dirty"] == "true"
    assert tags["vitscale.code"] == version.short and version.short.startswith("c" * 12 + "+")
    params = dict(query(database, "select key, value from params where run_uuid = ?", run_id))
    assert params == {"optim.lr": "0.001", "data.path": "http://host/x", "launch.nodes": "2"}
    sent = yaml.safe_load(artifact(database, run_id, "config.yaml").read_text())
    assert sent["data"] == {"path": "http://host/x"} and sent["launch"] == {"nodes": 2}
    assert artifact(database, run_id, "pictures/a.png").read_bytes() == b"a picture"
    assert artifact(database, run_id, f"source-{version.short}.diff").read_text() == (
        "# untracked: vitscale/new.py\n+  api_key: '***'\n+uri: http://host/x\n"
    )
    (experiment,) = query(database, "select experiment_id from runs")[0]
    page = f"#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    assert sum(page in text for text in said) >= 1


def test_a_run_that_mlflow_lost_is_sent_again(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        log_steps(tracker, range(1, 5))
    (lost,) = run_ids(database)
    for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
        query(database, f"delete from {table} where run_uuid = ?", lost)
    with open_tracker(resume_step=4) as tracker:
        log_steps(tracker, range(5, 7))
    (run_id,) = run_ids(database)
    assert run_id != lost
    assert [step for key, step in points(database, run_id) if key == "train/lr"] == [*range(1, 7)]


def test_other_ranks_write_nothing(open_tracker: Callable[..., Tracker], tmp_path: Path) -> None:
    with open_tracker(is_writer=False) as tracker:
        log_steps(tracker, range(1, 3))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_logging_does_not_wait_for_the_store(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with (
        sqlite3.connect(database, isolation_level=None) as blocking,
        open_tracker() as tracker,
    ):
        blocking.execute("begin exclusive")
        log_steps(tracker, range(1, 101))
        blocking.execute("rollback")
    (run_id,) = run_ids(database)
    assert len(points(database, run_id)) == 200


def test_an_invalid_uri_is_refused_before_any_write(
    open_tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        open_tracker(settings=TrackingSettings(uri="htp://host"))
    assert not (tmp_path / "run/journal.jsonl").exists()


def test_the_node_is_watched_until_the_run_ends(
    open_tracker: Callable[..., Tracker], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_sync, "SYSTEM_SAMPLE_S", 0.05)
    with open_tracker(settings=TrackingSettings(uri=f"sqlite:///{database}")) as tracker:
        log_steps(tracker, range(1, 2))
        sql = "select distinct key from metrics where key like 'system/%'"
        wait_until(lambda: query(database, sql), every_s=0.05)
    assert any(key.endswith("/cpu_utilization_percentage") for (key,) in query(database, sql))
    assert "SystemMetricsMonitor" not in {thread.name for thread in threading.enumerate()}
    stored = find_stored_run(f"sqlite:///{database}", "digits")
    assert stored is not None and set(stored.rows[0].metrics) == {"train/loss", "train/lr"}


@pytest.fixture
def folder(open_tracker: Callable[..., Tracker], tmp_path: Path) -> Path:
    """Of a finished run that only has its journal."""
    settings = TrackingSettings(uri=None, experiment="copies")
    with open_tracker(settings=settings, note="a note") as tracker:
        log_steps(tracker, range(1, 300))
    (tmp_path / "run/results.csv").write_text("a\n")
    (tmp_path / "secret.csv").write_text("b\n")
    (tmp_path / "run/results.json").symlink_to(tmp_path / "secret.csv")
    return tmp_path / "run"


def content(database: Path, run_id: str) -> list[Any]:
    """Everything that the store has of a run."""
    tables = [
        query(database, f"select * from {table} where run_uuid = ?", run_id)
        for table in ("runs", "metrics", "params", "tags")
    ]
    files = artifact(database, run_id, "").rglob("*")
    return [*tables, [(str(path), path.stat().st_mtime_ns) for path in files]]


def test_a_copy_is_complete_and_made_once(folder: Path, database: Path) -> None:
    record = read_record(folder)
    assert record is not None and (record.status, record.experiment) == ("FINISHED", "copies")
    first = send(folder, database)
    assert (first.num_points, first.num_files) == (2 * 299, 2)  # nothing outside the folder
    before = content(database, first.run_id)
    again = send(folder, database)
    assert (again.run_id, again.num_points, again.num_files) == (first.run_id, 0, 0)
    assert content(database, first.run_id) == before
    rows = [row for row, _ in read_rows(folder / "journal.jsonl")]
    moments = query(database, "select timestamp from metrics")
    assert {moment for (moment,) in moments} == {int(row.time * 1000) for row in rows}
    sql = "select status, start_time, end_time from runs"
    assert query(database, sql) == [("FINISHED", int(rows[0].time * 1000), 2 * 10**12)]
    assert tags_of(database, first.run_id)["mlflow.note.content"] == "a note"


def test_an_interrupted_copy_is_completed(
    folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOff(Exception):
        pass

    with monkeypatch.context() as patch, pytest.raises(CutOff):
        patch.setattr(mlflow_sync, "METRICS_PER_BATCH", 100)
        batches = mlflow_sync._batches

        def two(entries: Any, size: int) -> Any:
            for number, batch in enumerate(batches(entries, size)):
                if size == 100 and number == 2:
                    raise CutOff
                yield batch

        patch.setattr(mlflow_sync, "_batches", two)
        send(folder, database)
    (run_id,) = run_ids(database)
    assert 0 < len(points(database, run_id)) < 2 * 299
    send(folder, database)
    assert run_ids(database) == [run_id] and status(database, run_id) == "FINISHED"
    assert len(points(database, run_id)) == len(set(points(database, run_id))) == 2 * 299


def test_runs_name_the_run_that_their_weights_come_from(
    folder: Path, database: Path, open_tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    origin = send(folder, database).run_id
    without = TrackingSettings(uri=None)
    for stage, tag in (("finetune", "vitscale.init_run_id"), ("evaluate", "mlflow.parentRunId")):
        child = tmp_path / stage
        path = str(folder / "checkpoints/step-00000010")
        with open_tracker(folder=child, settings=without, stage=stage, origin=path) as tracker:
            log_steps(tracker, range(1, 2))
        assert tags_of(database, send(child, database).run_id)[tag] == origin


def test_files_are_uploaded_to_the_run_of_a_folder(folder: Path, database: Path) -> None:
    said: list[str] = []
    file = folder / "results.csv"
    assert not upload(folder, [file], say=said.append) and not said  # MLflow has no run of it
    run_id = send(folder, database).run_id
    assert upload(folder, [file], place="exported/x", say=said.append)
    assert said == [f"uploaded to MLflow run {run_id}"]
    assert artifact(database, run_id, "exported/x/results.csv").read_text() == "a\n"
    database.unlink()
    assert not upload(folder, [file], say=said.append)
    assert "not uploaded to MLflow (there is no" in said[-1] and not database.exists()
    append_event(folder, "mlflow", {"uri": "nonsense://host", "run_id": "x"})
    assert not upload(folder, [file], say=said.append)
    assert "not uploaded to MLflow" in said[-1] and len(read_links(folder)) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(75), "PAUSED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(2), "FAILED"),
        (RuntimeError(), "FAILED"),
    ],
)
def test_final_status_follows_the_error(error: BaseException | None, expected: str) -> None:
    assert final_status(error) == expected


def test_the_tracker_imports_no_mlflow_and_no_torch() -> None:
    code = (
        "import sys, vitscale.tracking.tracker, vitscale.tracking.console\n"
        "assert not {'mlflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
