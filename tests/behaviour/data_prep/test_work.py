"""Units shared by processes of several machines, and items by those of one."""

import os
import pickle
import re
import socket
import threading
import time
from functools import partial

import pytest

from data_prep.steps import work as sharing
from data_prep.steps.work import Step, WorkFolder
from tests.support.corpora.image_corpus import run_of
from tests.support.tables import every, refused
from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.config.errors import FailureKind, WorkerError
from vitscale.distributed.processes import descendants
from vitscale.distributed.worker_processes import Workers

# Above the largest that Linux gives.
NO_PID = 1 << 23


@pytest.fixture
def work(tmp_path) -> WorkFolder:
    folder = WorkFolder(run_of(tmp_path / "in", tmp_path / "out"))
    folder.path.mkdir()
    folder.open()
    return folder


def run(work: WorkFolder, units):
    """Do the units that are not done; returns those done here, in order."""
    done = []

    def do(work, unit):
        done.append(unit)
        (work.path / unit).touch()

    here = Workers(partial(sharing.attempt, work), num=1, imports=())
    sharing._share(work, Step("do", lambda work: units, do), here)
    return done


def process(work: WorkFolder, where, pid, *, age_s=0.0):
    """Name of a process whose heartbeat was some time ago."""
    heartbeat = work.path / "tmp" / f"{where}.{pid}" / "alive"
    heartbeat.parent.mkdir(exist_ok=True)
    heartbeat.touch()
    then = time.time() - age_s
    os.utime(heartbeat, (then, then))
    return heartbeat.parent.name


def test_every_unit_is_done_once(work):
    units = ["a", "b", "c"]
    assert sorted(run(work, units)) == units
    assert run(work, units) == []

    # A claim that stayed would keep a unit from being done again after its file was lost.
    assert not list((work.path / "claims").iterdir())


def test_what_others_did_meanwhile_is_seen(work, monkeypatch):
    # Another process makes the file between the first look at it and the claim.
    take = WorkFolder.take

    def late(work, claim):
        (work.path / claim.name).touch()
        return take(work, claim)

    monkeypatch.setattr(WorkFolder, "take", late)
    assert run(work, ["a"]) == []

    # The error of another task ends this one as well.
    (work.path / "failed.json").write_text('{"text": "bad"}')
    with refused("bad"):
        run(work, ["a"])


@every(skew_s="0.0, -3600.0, 3600.0")
def test_claims_of_silent_processes_are_taken_over(work, skew_s, monkeypatch):
    """By the file system's clock. In a new container the ids of a dead one live again."""
    here = socket.gethostname()

    # Above the 60 s after which a process counts as dead.
    old = 65.0
    my_pid = os.getpid()
    names = {
        # A heartbeat tells, whether a process of this id lives here or not.
        process(work, f"{here}-1", my_pid, age_s=old): True,
        process(work, f"{here}-2", my_pid): False,
        process(work, f"{here}-3", NO_PID): False,
        process(work, f"{here}-4", NO_PID, age_s=old): True,
        process(work, "elsewhere-1", 1, age_s=50): False,
        process(work, "elsewhere-2", 1, age_s=old): True,
        # Never had one, or its folder was removed.
        "gone-1.1": True,
    }
    # The clock of this machine may be an hour off that of the file server.
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew_s)
    for name, is_dead in names.items():
        claim = work.path / "claims" / name
        claim.symlink_to(name)

        # The first attempt removes the claim.
        assert not work.take(claim), name
        assert work.take(claim) == is_dead, name

    # Unfinished files of other hosts are left: their clean-up is the business of those hosts.
    work.clean()
    folder = work.path / "tmp"
    kept = {name for name in names if (folder / name).exists()}
    dead_here = {f"{here}-1.{my_pid}", f"{here}-4.{NO_PID}"}
    assert kept == names.keys() - {"gone-1.1"} - dead_here


def test_a_task_that_starts_again_has_another_name(work):
    """Though its host and its process id are the same; workers are named after their task."""
    again = WorkFolder(work.run)
    assert again.scratch.name != work.scratch.name
    of_worker = pickle.loads(pickle.dumps(work))
    assert of_worker.scratch.name == work.scratch.name


def test_a_task_that_ends_frees_what_its_workers_held(work):
    mine = work.claim("a")
    mine.symlink_to(process(work, work.task, NO_PID))
    other = work.claim("b")
    other.symlink_to(process(work, "elsewhere-1", 1))
    work.leave()

    # The first attempt removes a dead claim, the second gets the unit.
    assert not work.take(mine)
    assert work.take(mine)
    assert not work.take(other)
    assert not work.take(other)


def test_a_wait_says_for_whom_and_how_long(work, monkeypatch, capsys):
    monkeypatch.setattr(sharing, "SAY_WAIT_S", 0.05)
    work.claim("a").symlink_to(process(work, "node-7-1234abcd", 55))
    thread = threading.Thread(target=lambda: run(work, ["a"]), daemon=True)
    thread.start()
    printed = []

    def lines():
        printed.extend(capsys.readouterr().out.splitlines())
        return printed

    # The host, without the random part of the task's name.
    wait_until(lambda: len(lines()) >= 2)
    (work.path / "a").touch()
    thread.join(PATIENCE_S)
    expected = r"do: waited \d+ s for 1 units of node-7 \(process 55\); a process that is silent"
    for line in printed:
        assert re.match(expected, line)


def test_units_of_living_processes_are_waited_for(work, monkeypatch):
    monkeypatch.setattr(sharing, "WAIT_S", 0.02)
    (work.path / "claims/a").symlink_to(process(work, "elsewhere", 1))
    done = []
    thread = threading.Thread(target=lambda: done.extend(run(work, ["a"])), daemon=True)
    thread.start()

    # Five looks at the unit.
    time.sleep(0.1)
    assert not done
    assert thread.is_alive()

    # As if the other process had made the file.
    (work.path / "a").touch()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not done


def test_a_process_has_a_heartbeat(work, monkeypatch):
    monkeypatch.setattr(sharing, "HEARTBEAT_S", 0.01)
    work.open()
    path = work.scratch / "alive"

    # The thread, not the opening, must change this time.
    os.utime(path, (1, 1))
    wait_until(lambda: path.stat().st_mtime > 1)


@every(num="1, 2")
def test_each_result_has_the_position_of_its_item(num):
    # Every third item takes long, so that the results come in another order.
    items = [number / 1e6 for number in range(50)]
    for number in range(0, 50, 3):
        items[number] = 0.05
    with Workers(time.sleep, num=num, imports=()) as workers:
        results = sorted(workers.results(iter(items)))
    assert results == [(position, item, None) for position, item in enumerate(items)]


def test_an_error_is_raised_here_and_ends_the_workers():
    before = descendants(os.getpid())
    with pytest.raises(ValueError, match="invalid literal") as caught:
        with Workers(int, num=2, imports=()) as workers:
            list(workers.results(["1", "x", "2"]))

    # Where it was raised is in the traceback of the other process, which is passed on as a note.
    assert "in a worker process" in caught.value.__notes__[0]

    # The server and its tracker.
    assert len(descendants(os.getpid())) <= len(before) + 2


def test_a_dead_worker_process_is_reported():
    """Not as bad input, which no job of SLURM would try again."""
    with pytest.raises(WorkerError, match="a worker process died") as caught:
        with Workers(os._exit, num=2, imports=()) as workers:
            list(workers.results([1, 1, 1]))
    assert caught.value.kind.exit_code not in (0, FailureKind.BAD_INPUT.exit_code)
