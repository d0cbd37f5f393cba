"""One MLflow run across attempts, in a real SQLite store, by a tracker or by `sync` alone."""

import sqlite3
import sys
import threading

import pytest
import wandb
import yaml

from launch.comparison.sync import sync
from tests.support.run_folders import tracker_of
from tests.support.tables import refused, words
from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.config.packaged import SourceVersion
from vitscale.distributed.events import read_events
from vitscale.tracking import tracker as tracker_module
from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_sync import (
    MlflowRun,
    close_run,
    read_record,
    stored_runs,
    upload,
)
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker, final_status

CONFIG = yaml.safe_load("""
{optim: {lr: 0.001}, data: {path: "http://me:hunter2@host/x"}, launch: {nodes: 2, setup: [x]}}
""")


@pytest.fixture
def store(mlflow_database):
    return sqlite3.connect(mlflow_database, isolation_level=None)


@pytest.fixture
def open_tracker(mlflow_database, tmp_path, monkeypatch):
    # Nothing here is about the waits that are bounded for a training's sake.
    for name in ("CLOSE_WAIT_S", "FAILED_CLOSE_WAIT_S"):
        monkeypatch.setattr(tracker_module, name, PATIENCE_S)
    monkeypatch.setattr(tracker_module, "SEND_S", 0.05)
    set_version(monkeypatch, SourceVersion(commit="a" * 40, patch=""))

    def open_it(config=CONFIG, **changes):
        folder = changes.pop("folder", tmp_path / "run")
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        settings = {
            "uri": f"sqlite:///{mlflow_database}",
            "system_metrics": False,
            **changes.pop("settings", {}),
        }
        arguments = {"settings": TrackingSettings(**settings), "name": "digits"}
        return tracker_of(folder, **(arguments | changes))

    return open_it


def set_version(monkeypatch, version: SourceVersion):
    monkeypatch.setattr(tracker_module, "source_version", lambda: version)


def log_steps(tracker: Tracker, steps):
    for step in steps:
        tracker.log({"train/loss": 1 / step, "zero": 0.0}, step=step)


def select(store, what):
    """Rows, or values where one column is selected."""
    rows = store.execute(f"select {what}").fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def tags(store):
    return dict(select(store, "key, value from tags"))


def artifact(database, name):
    (run_id,) = select(sqlite3.connect(database), "run_uuid from runs")
    return database.parent / "mlflow-artifacts" / run_id / "artifacts" / name


def send(folder, database) -> MlflowRun:
    run = MlflowRun(folder, f"sqlite:///{database}", say=print)
    run.sync("FINISHED", ended=2e9)
    return run


def test_a_start_says_which_steps_its_journal_lacks(open_tracker):
    # Lines at 5 and 10, lost but for a start at 0; then a checkpoint one step or more after them.
    lines = []
    for first, resume_step in ((10, 0), (0, 14), (0, 15)):
        settings = {"uri": None, "log_every_steps": 5}
        tracker = open_tracker(
            settings=settings, resume_step=resume_step, say=lines.append
        )
        with tracker:
            log_steps(tracker, range(5, first + 1, 5))

    # Up to step 14 no line was due.
    assert lines == ["journal.jsonl has no lines of steps 11 to 15"]


def test_a_resumed_run_is_one_run_with_each_step_once(open_tracker, store):
    lines = []
    with pytest.raises(SystemExit), open_tracker(say=lines.append) as first:
        log_steps(first, range(1, 11))
        raise SystemExit(75)
    ((experiment, status),) = select(store, "experiment_id, status from runs")
    assert status == "SCHEDULED"
    # Both lines, of the start and of the end, have the page with the charts.
    page = f"#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    assert [page in line for line in lines] == [True, True]

    second = open_tracker(resume_step=6)  # the checkpoint was older than the last line
    wait_until(lambda: select(store, "status from runs") == ["RUNNING"])
    log_steps(second, range(7, 15))
    second.close(status="FINISHED")
    second.close(status="FAILED")  # does nothing
    assert select(store, "status from runs") == ["FINISHED"]
    steps = range(1, 15)
    expected = [(key, step) for key in ("train/loss", "zero") for step in steps]
    assert select(store, "key, step from metrics order by key, step") == expected

    # Finished for good: a new start, such as an evaluation's, is another run.
    lines.clear()
    open_tracker(resume_step=-1, say=lines.append).close(status="FINISHED")
    assert select(store, "count(*) from runs") == [2]
    assert len(lines) == 1


def test_a_start_at_step_0_continues_an_unfinished_run_of_the_same_settings_and_code(
    open_tracker, store, monkeypatch
):
    for _ in range(2):
        open_tracker().close(status="PAUSED")
    assert select(store, "count(*) from runs") == [1]

    # With other code or other settings its first steps are not those of the same curve.
    set_version(monkeypatch, SourceVersion(commit="b" * 40, patch=""))
    open_tracker().close(status="PAUSED")
    open_tracker(CONFIG | {"optim": {"lr": 1.0}}).close(status="PAUSED")
    assert select(store, "count(*) from runs") == [3]


def test_what_a_run_shows_is_without_secrets(
    open_tracker, store, mlflow_database, monkeypatch
):
    # Several nodes cannot share an SQLite file, so in a job nothing is sent to it.
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    patch = "# untracked: vitscale/new.py\n+  api_key: abc\n+uri: http://me:pw@host/x\n"
    version = SourceVersion(commit="c" * 40, patch=patch)
    set_version(monkeypatch, version)
    lines = []
    tracker = open_tracker(
        settings={"tags": {"optim": "a"}, "also": ("tensorboard", "wandb")},
        say=lines.append,
        tags={"model": "B/16"},
        note="**What:** http://u:p@h",
    )
    with tracker:
        log_steps(tracker, range(1, 3))
        pictures = tracker.folder / "pictures"
        pictures.mkdir()
        (pictures / "a.png").write_bytes(b"a picture")
    wandb.teardown()
    assert any("vitscale compare sync" in line for line in lines)
    assert select(store, "count(*) from runs") == [0]

    # Both other stores write files, whose bytes are searched as they are.
    shown = (b"http://host/x", b"**What:** http://h", b"B/16", b"0.001")
    for pattern in ("tensorboard/*", "wandb/offline*/*.wandb"):
        (path,) = tracker.folder.glob(pattern)
        content = path.read_bytes()
        for text in (*shown, version.short.encode()):
            assert text in content
        for text in (b"hunter2", b"u:p", b"setup"):
            assert text not in content

    # The same for MLflow, to which the folder is sent after the job.
    send(tracker.folder, mlflow_database)
    stored = tags(store)
    expected = yaml.safe_load("""
    {mlflow.runName: digits, vitscale.stage: pretrain, vitscale.job_id: "4711", model: B/16,
     optim: a, mlflow.note.content: "**What:** http://h"}
    """)
    assert stored.items() >= expected.items()
    assert stored["mlflow.source.git.commit"] == "c" * 40
    assert stored["vitscale.code"] == version.short
    assert version.short.startswith("c" * 12 + "+")
    params = dict(select(store, "key, value from params"))
    assert params == yaml.safe_load(
        "{optim.lr: '0.001', data.path: http://host/x, launch.nodes: '2'}"
    )

    config = yaml.safe_load(artifact(mlflow_database, "config.yaml").read_text())
    assert config["data"] == {"path": "http://host/x"}
    assert config["launch"] == {"nodes": 2}
    assert artifact(mlflow_database, "pictures/a.png").read_bytes() == b"a picture"
    source = artifact(mlflow_database, f"source-{version.short}.diff").read_text()
    assert source == (
        "# untracked: vitscale/new.py\n+  api_key: '***'\n+uri: http://host/x\n"
    )


def test_a_run_that_mlflow_lost_is_sent_again(open_tracker, store):
    with open_tracker() as tracker:
        log_steps(tracker, range(1, 5))
    # As after somebody has deleted the run for good; the folder still has its id.
    for table in "metrics latest_metrics params tags runs".split():
        store.execute(f"delete from {table}")
    with open_tracker(resume_step=4) as tracker:
        log_steps(tracker, range(5, 7))
    assert select(store, "step from metrics where key = 'zero'") == [*range(1, 7)]


def test_other_ranks_and_an_invalid_address_write_nothing(open_tracker, tmp_path):
    with open_tracker(is_writer=False) as tracker:
        log_steps(tracker, range(1, 3))
    with refused("tracking.uri"):
        open_tracker(settings={"uri": "htp://host"})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_store_that_fails_is_a_warning_and_a_missing_package_an_error(
    open_tracker, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").write_text("no folder")
    lines = []
    settings = {"uri": "http://127.0.0.1:1", "also": ("tensorboard",)}
    with open_tracker(settings=settings, say=lines.append) as tracker:
        log_steps(tracker, range(1, 3))
    assert any("tensorboard" in line and "training continues" in line for line in lines)

    # For each store the command that makes up for it, from the journal.
    command = f"vitscale compare sync {run} "
    ends = [line.partition(command)[2] for line in lines if command in line]
    assert ends == [
        "--to tensorboard sends the rest",
        "--uri http://127.0.0.1:1 sends the rest",
    ]
    assert len([*read_rows(run / "journal.jsonl")]) == 2

    # A package can be installed before a start, so there is no reason to begin without.
    monkeypatch.setitem(sys.modules, "vitscale.tracking.wandb_sync", None)
    with refused(r"(?s)tracking.also: .*pip install 'vitscale\[wandb\]'"):
        open_tracker(settings={"also": ("wandb",)})


def test_logging_does_not_wait_for_the_store(open_tracker, store):
    with open_tracker() as tracker:
        # Nobody else can write now, and all steps are logged in the meantime.
        store.execute("begin exclusive")
        log_steps(tracker, range(1, 101))
        store.execute("rollback")
    assert select(store, "count(*) from metrics where key = 'zero'") == [100]


def test_the_node_is_watched_until_the_run_ends(
    open_tracker, store, mlflow_database, monkeypatch
):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    cpu = "key from metrics where key like 'system/cpu_utilization_percentage'"
    with open_tracker(settings={"system_metrics": True}) as tracker:
        tracker.log({"train/loss": 1.0}, step=1)
        wait_until(lambda: select(store, cpu), every_s=0.05)
    names = {thread.name for thread in threading.enumerate()}
    assert "SystemMetricsMonitor" not in names

    # Measurements of the node are no metrics of the run that is compared.
    query = "attributes.run_name = 'digits'"
    ((_, rows),) = stored_runs(f"sqlite:///{mlflow_database}", query, limit=9)
    assert [row.metrics for row in rows] == [{"train/loss": 1.0}]


# ---- a run that has a journal only, sent later ------------------------------------------------


@pytest.fixture
def folder(open_tracker, tmp_path):
    """With a file that is sent, and a link to one outside, which is not."""
    run = tmp_path / "run"
    with open_tracker(settings={"uri": None, "experiment": "copies"}) as tracker:
        log_steps(tracker, range(1, 300))
    (run / "results.csv").write_text("a\n")
    secret = tmp_path / "secret.csv"
    secret.write_text("b\n")
    (run / "results.json").symlink_to(secret)
    return run


def test_a_copy_is_completed_and_made_once(folder, store, mlflow_database):
    def content():
        tables = [
            select(store, f"* from {name}")
            for name in "runs metrics params tags".split()
        ]
        files = artifact(mlflow_database, "").rglob("*")
        return [*tables, [(path, path.stat().st_mtime_ns) for path in files]]

    record = read_record(folder)
    assert record.status == "FINISHED"
    assert record.experiment == "copies"
    events = read_events(folder)

    # The first time, it is interrupted.
    path = folder / "journal.jsonl"
    journal = path.read_bytes()
    path.write_bytes(journal[: len(journal) // 2])
    cut_off = MlflowRun(folder, f"sqlite:///{mlflow_database}", say=print)
    cut_off.sync("RUNNING")
    path.write_bytes(journal)

    # The second time the rest is sent, and no point twice.
    first = send(folder, mlflow_database)
    assert first.run_id == cut_off.run_id
    assert cut_off.num_points
    assert cut_off.num_points + first.num_points == 299 * 2
    assert first.num_files == 2  # nothing outside the folder

    before = content()
    again = send(folder, mlflow_database)
    assert again.run_id == first.run_id
    assert again.num_points == 0
    assert again.num_files == 0
    assert content() == before
    assert read_events(folder) == events

    # The times are those of the training, not of the copy.
    times = [int(row.time * 1000) for row, _ in read_rows(path)]
    assert set(select(store, "timestamp from metrics")) == set(times)
    sql = "status, start_time, end_time from runs"
    assert select(store, sql) == [("FINISHED", times[0], 2 * 10**12)]


def test_runs_name_the_run_that_their_weights_come_from(
    folder, store, mlflow_database, open_tracker
):
    """Also where all are sent by one command, which names them in any order."""
    (folder / "results.json").unlink()  # a link
    children = []
    for stage in ("evaluate", "finetune"):
        child = folder.parent / stage
        children.append(str(child))
        run = open_tracker(
            folder=child,
            stage=stage,
            settings={"uri": None},
            origin=str(folder / "checkpoints/step-00000010"),
        )
        with run:
            run.log({"loss": 1.0}, step=1)
    sync([*children, str(folder), "--uri", f"sqlite:///{mlflow_database}"])

    # The training is the oldest of the three, which have one name.
    runs = select(store, "run_uuid from runs where name = 'digits' order by start_time")
    sql = "key, value from tags where key in ('mlflow.parentRunId', 'vitscale.init_run_id')"
    assert dict(select(store, sql)) == {
        "mlflow.parentRunId": runs[0],
        "vitscale.init_run_id": runs[0],
    }


def test_files_are_uploaded_to_the_run_of_a_folder(
    open_tracker, folder, mlflow_database
):
    lines = []
    file = folder / "results.csv"
    upload(folder, [file], say=lines.append)
    assert not lines  # the run is not tracked

    open_tracker().close(status="FINISHED")
    upload(folder, [file], place="exported/x", say=lines.append)
    assert lines[-1].startswith("uploaded to MLflow run ")
    assert artifact(mlflow_database, "exported/x/results.csv").read_text() == "a\n"

    # The export itself is done, so a store that fails is no error of it.
    mlflow_database.write_bytes(b"no database")
    upload(folder, [file], say=lines.append)
    assert lines[-1].startswith("warning: not uploaded to MLflow (")


def test_final_status_follows_the_error():
    # 75 is the code of a training that was asked to stop and can be resumed.
    endings = {
        None: "FINISHED",
        SystemExit(0): "FINISHED",
        SystemExit(75): "PAUSED",
        KeyboardInterrupt(): "KILLED",
        SystemExit(2): "FAILED",
        RuntimeError(): "FAILED",
    }
    assert {error: final_status(error) for error in endings} == endings


@words(status="KILLED FAILED")
def test_a_launcher_says_how_a_killed_process_ended(
    open_tracker, folder, store, status
):
    """One that has said it itself is left alone, and so is a folder without a record."""
    open_tracker().close(status="PAUSED")
    close_run(folder, status, say=print)
    assert select(store, "status from runs") == ["SCHEDULED"]

    # Of a process that was killed there is no second event.
    (events,) = (folder / "events").iterdir()
    lines = [line for line in events.read_text().splitlines() if '"ended"' not in line]
    events.write_text("\n".join(lines))
    close_run(folder, status, say=print)
    record = read_record(folder)
    assert record.status == status
    assert select(store, "status from runs") == [status]

    close_run(folder.parent, status, say=print)
    assert not (folder.parent / "events").exists()
