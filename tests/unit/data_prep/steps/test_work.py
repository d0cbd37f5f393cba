"""Units shared by processes: each is done, dead owners are replaced, the living are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data_prep.steps import work as sharing
from data_prep.steps.work import DEAD_AFTER_S, Step, WorkFolder, machine
from tests.support.corpora.preparing import run_of
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    folder = WorkFolder(run_of(tmp_path / "in", tmp_path / "out"))
    folder.path.mkdir()
    folder.open()
    return folder


def run(work: WorkFolder, units: list[str], *, start: int = 0) -> list[str]:
    """Do the units that are not done; returns those done here, in order."""
    done: list[str] = []

    def do(work: WorkFolder, unit: str) -> None:
        done.append(unit)
        (work.path / unit).touch()

    sharing._share(work, Step("do", lambda work: units, do), None, start=start)
    return done


def claim(work: WorkFolder, unit: str, *, where: str, pid: int, age_s: float = 0.0) -> Path:
    heartbeat = work.path / "tmp" / f"{where}.{pid}" / "alive"
    heartbeat.parent.mkdir(exist_ok=True)
    heartbeat.touch()
    os.utime(heartbeat, (time.time() - age_s, time.time() - age_s))
    path = work.path / "claims" / unit
    path.symlink_to(heartbeat.parent.name)
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_every_unit_is_done_once_from_the_given_start(work: WorkFolder) -> None:
    assert run(work, ["a", "b", "c"], start=4) == ["b", "c", "a"]
    assert run(work, ["a", "b", "c"]) == []
    assert not list((work.path / "claims").iterdir())


def test_a_dead_process_of_this_machine_is_replaced_at_once(work: WorkFolder) -> None:
    claim(work, "a", where=machine(), pid=dead_pid())
    assert run(work, ["a"]) == ["a"]


def test_claims_of_other_machines_hold_until_the_heartbeat_stops(work: WorkFolder) -> None:
    claim(work, "a", where="elsewhere", pid=2, age_s=DEAD_AFTER_S + 5)
    assert run(work, ["a"]) == ["a"]
    path = claim(work, "b", where="elsewhere", pid=1)
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.extend(run(work, ["b"])), daemon=True)
    thread.start()
    time.sleep(1.0)
    assert not done and thread.is_alive()
    # The other one finishes: nothing is left to do here.
    (work.path / "b").touch()
    path.unlink()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not done


def test_process_in_another_container_is_not_looked_up(
    work: WorkFolder,
) -> None:
    prefix, _, space = machine().rpartition("-")
    assert prefix and space == str(os.stat("/proc/self/ns/pid").st_ino)
    container, pid = f"{prefix}-{int(space) + 1}", dead_pid()
    scratch = work.scratch.with_name(f"{container}.{pid}")
    claim(work, "a", where=container, pid=pid)
    work.open()
    assert scratch.exists()
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.extend(run(work, ["a"])), daemon=True)
    thread.start()
    time.sleep(0.3)
    assert not done and thread.is_alive()
    (work.path / "a").touch()
    thread.join(PATIENCE_S)


def test_a_process_has_a_heartbeat(work: WorkFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "HEARTBEAT_S", 0.01)
    work.open()
    path = work.scratch / "alive"
    os.utime(path, (1, 1))
    wait_until(lambda: path.stat().st_mtime > 1)


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_skewed_clock_ends_no_claim(
    work: WorkFolder, skew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(work, "fresh", where="elsewhere", pid=1)
    claim(work, "old", where="elsewhere", pid=2, age_s=DEAD_AFTER_S + 5)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew_s)
    threading.Timer(0.5, (work.path / "fresh").touch).start()  # its owner has finished
    assert run(work, ["fresh", "old"]) == ["old"]
