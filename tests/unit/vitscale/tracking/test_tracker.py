"""One MLflow run across resumes, in a real SQLite store."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.mlflow_store import log_steps, points, query, tags_of
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import write_json
from vitscale.tracking import run_facts
from vitscale.tracking import tracker as tracker_module
from vitscale.tracking.mlflow_client import experiment_id, open_client, read_link
from vitscale.tracking.mlflow_run import upload_to_linked_run
from vitscale.tracking.parent_run import origin_tags
from vitscale.tracking.run_facts import DatasetFacts
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.source_version import SourceVersion
from vitscale.tracking.tracker import Tracker, final_status


def test_a_resumed_run_is_one_run_with_each_step_once(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with pytest.raises(SystemExit), open_tracker() as first:
        log_steps(first, range(1, 11))
        run_id = first.run_id
        raise SystemExit(75)
    status = "select status from runs where run_uuid = ?"
    assert query(database, status, str(run_id)) == [("SCHEDULED",)]

    second = open_tracker(resume_step=6)  # the checkpoint was older than the last line
    assert query(database, status, str(run_id)) == [("RUNNING",)]
    log_steps(second, range(7, 15))
    assert second.run_id == run_id
    second.close(status="FINISHED")
    assert query(database, status, str(run_id)) == [("FINISHED",)]
    assert points(database, run_id) == [
        (key, step) for key in ("train/loss", "train/lr") for step in range(1, 15)
    ]
    # Finished for good: the tracker may be closed twice, and a new start is another run.
    second.close(status="FAILED")
    third = open_tracker()
    assert third.run_id not in (None, run_id)
    third.close(status="FINISHED")


def test_a_pause_and_a_replaced_run_are_not_left_open(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with pytest.raises(SystemExit), open_tracker() as first:
        log_steps(first, range(1, 3))
        run_id = first.run_id
        raise SystemExit(75)
    assert tags_of(database, run_id)["vitscale.status"] == "paused"
    open_tracker(params={"optim": {"lr": 1.0}}).close(status="FINISHED")
    run = "select status, end_time - max(timestamp) from runs join metrics using (run_uuid) "
    assert query(database, run + "where run_uuid = ?", str(run_id)) == [("KILLED", 0)]


def test_event_counts_appear_with_the_first_event(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        for step, count in enumerate([0, 0, 2, 2, 0], start=1):
            tracker.log({"train/skipped_steps": count, "train/lr": 0, "never": 0}, step=step)
        run_id = tracker.run_id
    steps: dict[str, list[int]] = {}
    for key, step in points(database, run_id):
        steps.setdefault(key, []).append(step)
    assert steps == {"train/skipped_steps": [3, 4, 5]} | dict.fromkeys(
        ("train/lr", "never"), [1, 2, 3, 4, 5]
    )


def test_a_run_has_datasets_a_description_and_its_edits(
    open_tracker: Callable[..., Tracker],
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = SourceVersion(commit="c" * 40, diff="+ http://me:pass@host/x\n", untracked=())
    for module in (run_facts, tracker_module):
        monkeypatch.setattr(module, "source_version", lambda: version)
    facts = DatasetFacts(
        name="digits/train", digest="d" * 64, source="shards", context="training",
        num_samples=7, num_classes=2,
    )  # fmt: skip
    said: list[str] = []
    with open_tracker(note="**What:** digits", datasets=[facts], say=said.append) as tracker:
        run_id = str(tracker.run_id)
    tags = tags_of(database, run_id)
    assert tags["mlflow.note.content"] == "**What:** digits"
    assert tags["mlflow.source.git.commit"] == "c" * 40
    assert tags["mlflow.source.git.dirty"] == "true"
    sql = (
        "select d.name, digest, dataset_profile, t.value from datasets d "
        "join inputs i on source_id = dataset_uuid join input_tags t using (input_uuid) "
        "where destination_id = ?"
    )
    profile = '{"num_samples": 7, "num_classes": 2}'
    assert query(database, sql, run_id) == [("digits/train", "d" * 36, profile, "training")]
    diff = database.parent / f"mlflow-artifacts/{run_id}/artifacts/source-{version.short}.diff"
    assert diff.read_text().startswith("+ http://host/x\n")
    (experiment,) = query(database, "select experiment_id from runs where run_uuid = ?", run_id)[0]
    page = f"#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    assert sum(page in text for text in said) == 2  # at the start and at the end


def test_an_evaluation_is_a_child_of_the_training(database: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{database}"
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run/mlflow.json", {"uri": uri, "run_id": "x", "experiment": "y"})
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/step-00000010"):
        assert origin_tags(path, uri=uri, tag="from") == {"from": "x", "mlflow.parentRunId": "x"}
    assert origin_tags(tmp_path / "run", uri="http://other", tag="from") == {"from": "x"}
    assert origin_tags(tmp_path, uri=uri, tag="from") == {}
    assert origin_tags(tmp_path / "run", tag="from") == {"from": "x"}


def test_tags_and_params_are_stored_without_secrets(
    open_tracker: Callable[..., Tracker], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    own = TrackingSettings(uri=f"sqlite:///{database}", tags={"team": "a", "model": "mine"})
    with open_tracker(tags={"model": "B/16"}, settings=own) as tracker:
        log_steps(tracker, range(1, 3))
        run_id = str(tracker.run_id)
    tags = dict(query(database, "select key, value from tags where run_uuid = ?", run_id))
    params = dict(query(database, "select key, value from params where run_uuid = ?", run_id))
    assert tags["mlflow.runName"] == "digits" and tags["vitscale.stage"] == "pretrain"
    assert tags["vitscale.job_id"] == "4711" and tags["model"] == "B/16" and tags["team"] == "a"
    assert params == {"optim.lr": "0.001", "data.path": "http://host/x"}
    config = database.parent / "mlflow-artifacts" / run_id / "artifacts" / "config.yaml"
    assert config.read_text() == "path: http://host/x\nlaunch:\n  nodes: 2\n"


def test_params_changed_by_a_resume_are_in_a_tag(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        log_steps(tracker, range(1, 3))
    with open_tracker(resume_step=2, params={"optim": {"lr": 0.5}}) as tracker:
        run_id = str(tracker.run_id)
    tags = dict(query(database, "select key, value from tags where run_uuid = ?", run_id))
    assert tags["vitscale.changed_params"] == "optim.lr: 0.001 -> 0.5"
    assert tags["vitscale.resumed_from_step"] == "2"
    assert "vitscale.restored_from_journal" not in tags


def test_a_deleted_run_is_restored_from_the_journal(
    open_tracker: Callable[..., Tracker], database: Path, tmp_path: Path
) -> None:
    with open_tracker() as tracker:
        log_steps(tracker, range(1, 5))
    link = read_link(tmp_path / "run")
    assert link is not None
    for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
        query(database, f"delete from {table} where run_uuid = ?", link["run_id"])
    with open_tracker(resume_step=4) as tracker:
        log_steps(tracker, range(5, 7))
        run_id = tracker.run_id
    assert run_id != link["run_id"]
    assert [step for key, step in points(database, run_id) if key == "train/loss"] == [*range(1, 7)]
    tags = dict(query(database, "select key, value from tags where run_uuid = ?", str(run_id)))
    assert tags["vitscale.restored_from_journal"] == "true"


def test_a_link_to_another_store_is_not_followed(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        log_steps(tracker, range(1, 3))
        run_id = tracker.run_id
    copy = database.with_name("copy.db")
    shutil.copy(database, copy)  # contains a run of the same id
    settings = TrackingSettings(uri=f"sqlite:///{copy}")
    with open_tracker(settings=settings, resume_step=2) as tracker:
        assert tracker.run_id not in (None, run_id)


def test_a_fresh_start_continues_a_run_of_the_same_commit(
    open_tracker: Callable[..., Tracker], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ids = []
    for commit in ("a" * 40, "a" * 40, "b" * 40):
        version = SourceVersion(commit=commit, diff="", untracked=())
        monkeypatch.setattr(run_facts, "source_version", lambda version=version: version)
        tracker = open_tracker()
        run_ids.append(str(tracker.run_id))
        tracker.close(status="KILLED")
    assert run_ids[0] == run_ids[1] != run_ids[2]
    tags = dict(query(database, "select key, value from tags where run_uuid = ?", run_ids[2]))
    assert tags["vitscale.replaces_run"] == run_ids[0]


def test_edits_of_the_code_are_an_artifact_without_secrets(
    open_tracker: Callable[..., Tracker], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = "+lr = 2\n+  api_key: abc\n+uri: http://me:pw@host/x\n"
    version = SourceVersion(commit="a" * 40, diff=diff, untracked=("vitscale/new.py",))
    for module in (run_facts, tracker_module):
        monkeypatch.setattr(module, "source_version", lambda: version)
    with open_tracker() as tracker:
        run_id = str(tracker.run_id)
    tags = dict(query(database, "select key, value from tags where run_uuid = ?", run_id))
    assert tags["mlflow.source.git.dirty"] == "true"
    assert tags["vitscale.code"] == version.short and version.short.startswith("a" * 12 + "+")
    artifacts = database.parent / "mlflow-artifacts" / run_id / "artifacts"
    assert (artifacts / f"source-{version.short}.diff").read_text() == (
        "# untracked: vitscale/new.py\n+lr = 2\n+  api_key: '***'\n+uri: http://host/x\n"
    )


def test_other_ranks_write_nothing(open_tracker: Callable[..., Tracker], tmp_path: Path) -> None:
    with open_tracker(is_writer=False) as tracker:
        log_steps(tracker, range(1, 3))
        tracker.artifact(tmp_path / "missing")
        assert tracker.run_id is None
    assert not (tmp_path / "run").exists()


def test_without_uri_only_the_journal_is_written(
    open_tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    with open_tracker(settings=TrackingSettings(uri=None)) as tracker:
        log_steps(tracker, range(1, 3))
    names = {path.name for path in (tmp_path / "run").iterdir() if path.suffix != ".diff"}
    assert names == {"journal.jsonl", "tracking.json"}


def test_a_missing_artifact_does_not_block_metrics(
    open_tracker: Callable[..., Tracker], database: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    with open_tracker(say=said.append) as tracker:
        tracker.artifact(tmp_path / "missing.html")
        log_steps(tracker, range(1, 3))
        run_id = tracker.run_id
    assert len(points(database, run_id)) == 4
    times = query(database, "select timestamp from metrics where run_uuid = ?", str(run_id))
    assert all(abs(time.time() - moment / 1000) < 3600 for (moment,) in times), "milliseconds"
    assert any("missing.html was not uploaded" in text for text in said)


def test_files_are_uploaded_to_the_linked_run(database: Path, tmp_path: Path) -> None:
    uri = f"sqlite:///{database}"
    client = open_client(uri, say=lambda text: None)
    run_id = client.create_run(experiment_id(client, "uploads", uri=uri)).info.run_id
    write_json(tmp_path / "mlflow.json", {"uri": uri, "run_id": run_id, "experiment": "uploads"})
    file = tmp_path / "picture.png"
    file.write_bytes(b"a picture")
    said: list[str] = []
    assert upload_to_linked_run(tmp_path, [file], say=said.append)
    assert said == [f"uploaded to MLflow run {run_id}"]
    uploaded = database.parent / "mlflow-artifacts" / run_id / "artifacts/picture.png"
    assert uploaded.read_bytes() == b"a picture"
    upload_to_linked_run(tmp_path, [file], place="exported/x", say=said.append)
    assert (uploaded.parent / "exported/x/picture.png").exists()


def test_an_upload_without_a_store_is_a_warning(tmp_path: Path) -> None:
    """Nor does it create the store."""
    said: list[str] = []
    assert not upload_to_linked_run(tmp_path, [tmp_path / "a.png"], say=said.append)
    assert not said  # never tracked
    for uri, message in (
        (f"sqlite:///{tmp_path}/gone.db", "not uploaded to MLflow (there is no"),
        ("nonsense://host", "not uploaded to MLflow"),
    ):
        write_json(tmp_path / "mlflow.json", {"uri": uri, "run_id": "x", "experiment": "y"})
        assert not upload_to_linked_run(tmp_path, [tmp_path / "a.png"], say=said.append)
        assert message in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.json"]


def test_logging_does_not_wait_for_the_store(
    open_tracker: Callable[..., Tracker], database: Path
) -> None:
    with open_tracker() as tracker:
        run_id = tracker.run_id
        with sqlite3.connect(database, isolation_level=None) as blocking:
            blocking.execute("begin exclusive")
            log_steps(tracker, range(1, 101))
            blocking.execute("rollback")
    assert len(points(database, run_id)) == 200


def test_an_invalid_uri_is_refused_before_any_write(
    open_tracker: Callable[..., Tracker], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        open_tracker(settings=TrackingSettings(uri="htp://host"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(75), "PAUSED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(2), "FAILED"),
        (RuntimeError(), "FAILED"),
    ],
)
def test_final_status_follows_the_error(error: BaseException | None, status: str) -> None:
    assert final_status(error) == status


def test_the_tracker_imports_no_mlflow_and_no_torch() -> None:
    code = (
        "import sys, vitscale.tracking.tracker, vitscale.tracking.console\n"
        "assert not {'mlflow', 'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
