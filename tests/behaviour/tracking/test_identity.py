"""Which MLflow run a folder is: of its own, whatever was copied, moved, renamed or resumed."""

import json
import math
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from mlflow.tracking import MlflowClient

from launch.comparison.runs import load_runs
from tests.support.run_folders import tracker_of
from tests.support.tables import every
from vitscale.tracking import mlflow_sync
from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_sync import MlflowRun, own_record, stored_runs
from vitscale.tracking.wandb_sync import Reader as WandbReader


@pytest.fixture
def uri(mlflow_database):
    return f"sqlite:///{mlflow_database}"


@pytest.fixture
def store(mlflow_database):
    return sqlite3.connect(mlflow_database, isolation_level=None)


def train(folder, *, last, first=None, value=1.0, uri=None, name="base"):
    """An attempt from the checkpoint of step `first` on; None: of its last step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").touch()
    if first is None:
        first = max(journal_points(folder), default=0)
    config = yaml.safe_dump({"stage": "pretrain", "name": name})
    (folder / "config.yaml").write_text(config)
    with tracker_of(folder, uri=uri, name=name, resume_step=first) as tracker:
        for step in range(first + 10, last + 1, 10):
            # Steps that are trained again never have the same speed.
            speed = time.time()
            tracker.log({"train/loss": value, "vitals/images_per_s": speed}, step=step)


def send(folder, uri):
    run = MlflowRun(folder, uri, say=print)
    run.sync("FINISHED")
    return run.run_id


def points(store, run_id):
    """Step -> values of train/loss, in the order in which they were logged."""
    sql = "select step, value from metrics where run_uuid = ? and key = 'train/loss'"
    values = {}
    for step, value in store.execute(f"{sql} order by step, timestamp", [run_id]):
        values.setdefault(step, []).append(value)
    return values


def journal_points(folder):
    rows = read_rows(folder / "journal.jsonl")
    return {row.step: [row.metrics["train/loss"]] for row, _ in rows}


def num_runs(store):
    return int(store.execute("select count(*) from runs").fetchone()[0])


@every(in_mlflow_before="true, false", same_name="true, false")
def test_a_copy_that_goes_on_is_another_run(
    same_name, in_mlflow_before, tmp_path, uri, store
):
    base = tmp_path / "base"
    branch = tmp_path / "branch"
    name = "base" if same_name else "branch"
    train(base, last=30, uri=uri if in_mlflow_before else None)
    shutil.copytree(base, branch)

    # Both go on, from different checkpoints and with different losses.
    train(branch, first=20, last=60, value=2.0, name=name)
    train(base, last=50, value=3.0)
    runs = {folder: send(folder, uri) for folder in (branch, base)}
    assert runs[base] != runs[branch]
    assert num_runs(store) == 2
    for folder, run_id in runs.items():
        assert points(store, run_id) == journal_points(folder)

    # A second time nothing is sent, and a third attempt continues each of the two.
    train(branch, last=80, value=4.0, name=name)
    assert {folder: send(folder, uri) for folder in runs} == runs
    assert num_runs(store) == 2
    assert points(store, runs[branch]) == journal_points(branch)

    # The copy names what it was copied from.
    origin = own_record(base)
    sql = "select key, value from tags where run_uuid = ?"
    tags = dict(store.execute(sql, [runs[branch]]))
    assert tags["vitscale.copied_from"] == origin.tracking_id


def test_copies_that_only_lie_there_are_runs_of_their_own(tmp_path, uri, store):
    base = tmp_path / "base"
    train(base, last=30)
    copies = [Path(shutil.copytree(base, tmp_path / f"copy{i}")) for i in (1, 2)]
    folders = [base, *copies]

    def names():
        return [sorted(path.name for path in each.rglob("*")) for each in folders]

    before = names()
    ids = [send(folder, uri) for folder in folders]
    assert len({*ids}) == 3
    assert ids == [send(folder, uri) for folder in folders]
    stored = [name for (name,) in store.execute("select name from runs order by name")]
    assert stored == ["base", "copy1", "copy2"]

    # They may be backups, or of somebody else: what tells them apart is not written there.
    assert names() == before
    with mock.patch("vitscale.tracking.wandb_sync.wandb") as wandb:
        for folder in folders:
            WandbReader(folder)
    assert len({call.kwargs["id"] for call in wandb.init.call_args_list}) == 3


def test_a_moved_folder_stays_the_same_run(tmp_path, uri, store):
    base = tmp_path / "base"
    train(base, last=30)
    run_id = send(base, uri)
    there = tmp_path / "elsewhere/base"
    there.parent.mkdir()
    base.rename(there)
    assert send(there, uri) == run_id

    # Moved again, and trained where it is now.
    twice = there.rename(tmp_path / "third")
    train(twice, last=50, value=2.0)
    assert send(twice, uri) == run_id
    assert num_runs(store) == 1
    assert points(store, run_id) == journal_points(twice)

    # By another path to the same folder, too.
    (tmp_path / "link").symlink_to(twice)
    assert send(tmp_path / "link", uri) == run_id


def test_a_folder_that_goes_on_under_another_name_is_another_run(tmp_path, uri, store):
    base = tmp_path / "base"
    train(base, last=30)
    first = send(base, uri)

    # The name in its configuration, not that of the folder, says that a person means another run.
    renamed = base.rename(tmp_path / "branch")
    train(renamed, last=50, value=2.0, name="branch")
    second = send(renamed, uri)
    assert first != second
    assert points(store, second) == journal_points(renamed)
    assert max(points(store, first)) == 30


def test_folders_that_cannot_see_each_other_never_share_a_run(tmp_path, uri, store):
    """A copy on another machine: the path of the original is not there."""
    base = tmp_path / "base"
    far = tmp_path / "far"
    train(base, last=30)
    first = send(base, uri)
    shutil.copytree(base, far)
    hidden = base.rename(tmp_path / "hidden")
    train(far, last=50, value=2.0)
    assert send(far, uri) == first  # as if it had been moved

    # Now the original goes on, and does not see the copy.
    far = far.rename(tmp_path / "far-hidden")
    base = hidden.rename(base)
    train(base, last=60, value=3.0)
    second = send(base, uri)
    assert second != first
    assert points(store, second) == journal_points(base)
    assert points(store, first) == journal_points(far)
    assert send(base, uri) == second


def test_a_run_of_an_earlier_version_is_told_by_mlflow(tmp_path, uri, store):
    """Its events do not name the folder."""
    base = tmp_path / "base"
    train(base, last=30)
    (events,) = (base / "events").glob("*.jsonl")
    lines = []
    # An event begins with a line break, in case that the one before was cut.
    for line in events.read_text().split("\n\n"):
        event = json.loads(line)
        event.pop("folder", None)
        lines.append(json.dumps(event) + "\n")
    events.write_text("".join(lines))

    first = send(base, uri)
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    second = send(copy, uri)
    assert first != second
    assert send(base, uri) == first
    assert send(copy, uri) == second


def test_a_lost_attempt_does_not_hide_the_values_of_the_last_one(
    tmp_path, uri, capsys, store, monkeypatch
):
    folder = tmp_path / "run"
    train(folder, last=130, value=9.0)
    run_id = send(folder, uri)

    # Three points were sent whose steps are trained again, since the checkpoint was of step 100.
    train(folder, first=100, last=200, value=1.0)
    assert send(folder, uri) == run_id
    line = "steps 110 to 130 were trained again, with other values"
    assert line in capsys.readouterr().out
    ((_, rows),) = stored_runs(uri, "attributes.run_name = 'base'", limit=9)
    values = {row.step: [row.metrics["train/loss"]] for row in rows}
    assert values == journal_points(folder)

    # MLflow forgets nothing: the new value comes after the old one.
    before = points(store, run_id)
    assert before[110] == [9.0, 1.0]
    assert before[100] == [9.0]
    send(folder, uri)
    assert points(store, run_id) == before

    # Lost again: the last value that MLflow has counts, in whatever order a server lists them.
    listed = MlflowClient.get_metric_history
    monkeypatch.setattr(MlflowClient, "get_metric_history", lambda *a: listed(*a)[::-1])
    for value, values in ((1.0, [9.0, 1.0]), (9.0, [9.0, 1.0, 9.0])):
        train(folder, first=100, last=130, value=value)
        send(folder, uri)
        assert points(store, run_id)[110] == values

    # Equal values, as of a resume with the same settings, NaN and infinity too, are not sent twice.
    for value in (0.5, math.nan, math.inf, 0.0):
        equal = tmp_path / str(value)
        train(equal, last=130, value=value)
        again = send(equal, uri)
        train(equal, first=100, last=150, value=value)
        assert send(equal, uri) == again
        assert {len(values) for values in points(store, again).values()} == {1}


def test_compared_runs_are_read_as_logged_and_once(tmp_path, uri):
    # Two runs of one name: the newer one is meant.
    old = tmp_path / "old"
    new = tmp_path / "new"
    for folder, value in ((old, 1.0), (new, math.inf)):
        train(folder, last=10, value=value)
        send(folder, uri)
    (run,) = load_runs(["base"], uri=uri)
    assert run.series("train/loss") == [(10, math.inf)]
    assert run.label == "base (newest of this name)"

    # A link to a run that is named already is no third one.
    (tmp_path / "latest").symlink_to(new)
    names = [str(tmp_path / name) for name in ("old", "new", "latest")]
    assert [run.label for run in load_runs(names, uri=None)] == ["old", "new"]


def add_experiments(store, num):
    """Newer ones than any that is there."""
    # Straight into the table: MLflow would take minutes.
    columns = [row[1] for row in store.execute("pragma table_info(experiments)")]
    existing = store.execute("select * from experiments").fetchone()
    row = dict(zip(columns, existing, strict=True))
    insert = f"insert into experiments values ({','.join('?' * len(columns))})"
    now = int(time.time() * 1000) + 10**6
    store.execute("begin")
    for i in range(num):
        row |= {
            "experiment_id": 10_000 + i,
            "name": f"other{i}",
            "creation_time": now + i,
            "last_update_time": now + i,
        }
        store.execute(insert, list(row.values()))
    store.execute("commit")


def test_a_run_is_found_among_thousands_of_experiments(tmp_path, uri, store):
    parent = tmp_path / "parent"
    child = tmp_path / "child"
    train(parent, last=30)
    first = send(parent, uri)
    moved = MlflowRun(parent, uri, experiment="mine", say=print).run_id
    assert moved == first
    add_experiments(store, 2100)
    assert send(parent, uri) == first

    # In another experiment than the folder says: on the last of three pages.
    train(child, last=30, value=2.0)
    second = MlflowRun(child, uri, experiment="mine", say=print)
    second.sync("FINISHED")
    assert second.run_id != first
    assert send(child, uri) == second.run_id
    assert num_runs(store) == 2

    def ids(limit):
        runs = stored_runs(uri, "metrics.`train/loss` > 0", limit=limit)
        return [run.info.run_id for run, _ in runs]

    assert ids(9) == [second.run_id, first]

    # The newest one, in an experiment of a later page than the other's.
    store.execute("update experiments set creation_time = 1e16 where name = 'mine'")
    train(tmp_path / "last", last=30)
    third = send(tmp_path / "last", uri)
    newest = [third, second.run_id, first]
    for limit in (1, 2, 9):
        assert ids(limit) == newest[:limit]


def test_a_server_that_repeats_its_page_ends(monkeypatch):
    # A page without an experiment, and with a next one: whoever follows it never ends.
    class Page(list[Any]):
        token = "again"

    class Client:
        def search_experiments(self, page_token):
            return Page()

    assert mlflow_sync._find(Client(), "", limit=1) == []  # type: ignore[arg-type]
