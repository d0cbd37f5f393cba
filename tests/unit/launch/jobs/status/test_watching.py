"""When a watch raises an alarm, when it is over, and its exit code."""

from __future__ import annotations

from typing import Any

from launch.jobs.attempts import Ending
from launch.jobs.queue import QueuedJob
from launch.jobs.status.reading import RunStatus, read_status
from launch.jobs.status.watching import EXIT_STALLED, Watcher
from tests.unit.launch.jobs.status.conftest import NOW, RunFolder, job
from vitscale.config.errors import FailureKind

RUNNING = job("RUNNING", nodes="n[1-2]")


def look(watcher: Watcher, run: RunFolder, *jobs: QueuedJob, **more: Any) -> list[str]:
    values: dict[str, Any] = {"slurm_answers": True, "now": NOW} | more
    return watcher.look([status(run, *jobs, now=values["now"])], **values)


def status(run: RunFolder, *jobs: QueuedJob, now: float) -> RunStatus:
    return read_status(run.folder, jobs=jobs, now=now)


def test_a_run_without_steps_is_told_once_until_it_moves(run: RunFolder) -> None:
    watcher = Watcher(stalled_min=5)
    run.attempt(None)
    run.log(4, ago=10.0)
    assert look(watcher, run, RUNNING) == [] and not watcher.is_over
    (alarm,) = look(watcher, run, RUNNING, now=NOW + 400)
    assert "no step for 7 min" in alarm and "job 4711 on n[1-2]" in alarm
    assert (watcher.is_over, watcher.exit_code) == (True, EXIT_STALLED)
    assert look(watcher, run, RUNNING, now=NOW + 500) == []
    run.log(5, ago=-500)
    assert look(watcher, run, RUNNING, now=NOW + 600) == [] and not watcher.is_over
    assert len(look(watcher, run, RUNNING, now=NOW + 1000)) == 1


def test_waiting_in_the_queue_is_not_stalling(run: RunFolder) -> None:
    watcher = Watcher(stalled_min=5)
    run.attempt(Ending.STOPPED)
    assert look(watcher, run, job("PENDING", reason="Resources"), now=NOW + 9000) == []
    assert not watcher.is_over


def test_an_ended_run_is_told_with_its_reason_and_code(run: RunFolder) -> None:
    watcher = Watcher()
    run.attempt(None)
    assert look(watcher, run, RUNNING) == []
    run.attempt(Ending.DIVERGED, "losses are not finite", kind=FailureKind.DIVERGED)
    (alarm,) = look(watcher, run)
    assert "failed" in alarm and alarm.endswith(": losses are not finite")
    assert (watcher.is_over, watcher.exit_code) == (True, 76)


def test_a_run_is_not_over_while_slurm_does_not_answer(run: RunFolder) -> None:
    watcher = Watcher()
    run.attempt(Ending.STOPPED)
    look(watcher, run, job("PENDING", reason="BeginTime"))
    assert look(watcher, run, slurm_answers=False) == [] and not watcher.is_over
    assert len(look(watcher, run)) == 1
    assert (watcher.is_over, watcher.exit_code) == (True, 75)


def test_runs_that_ended_before_are_not_told(run: RunFolder, tmp_path) -> None:
    other = RunFolder(tmp_path / "old")
    other.attempt(Ending.FAILED)
    run.attempt(None)
    watcher = Watcher()
    found = [status(other, now=NOW), status(run, RUNNING, now=NOW)]
    assert watcher.look(found, slurm_answers=True, now=NOW) == [] and not watcher.is_over
