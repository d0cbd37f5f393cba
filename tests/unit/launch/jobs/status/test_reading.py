"""The state of a run by what SLURM and its folder say."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

from launch.jobs.attempts import Ending
from launch.jobs.queue import QueuedJob
from launch.jobs.status.reading import RunState, RunStatus, lock_holder, read_status
from tests.unit.launch.jobs.status.conftest import JOB, NOW, RunFolder, job


def status(run: RunFolder, *jobs: QueuedJob, **more: Any) -> RunStatus:
    return read_status(run.folder, **{"jobs": jobs, "now": NOW} | more)


def test_a_job_that_never_started_is_queued(run: RunFolder) -> None:
    found = status(run, job("PENDING", reason="Resources", start=NOW + 60))
    assert (found.state, found.since) == (RunState.QUEUED, NOW - 720)
    assert found.jobs[0].reason == "Resources"


def test_a_started_job_is_running(run: RunFolder) -> None:
    run.attempt(None)
    found = status(run, job("RUNNING", nodes="n[1-2]"))
    assert (found.state, found.since, found.is_starting) == (RunState.RUNNING, NOW - 60, True)
    run.log(1, ago=90)  # before this start
    run.log(2, ago=14)
    assert status(run).logged.eta_s is None
    run.log(4, **{"vitals/images_per_s": 812.0, "vitals/mfu": 0.4})
    found = status(run, job("RUNNING", nodes="n[1-2]"))
    assert not found.is_starting
    logged = found.logged
    assert (logged.step, logged.total_steps, logged.eta_s) == (4, 100, 192.0)
    assert (logged.images_per_s, logged.mfu, logged.loss) == (812.0, 0.4, 1.25)


def test_a_requeued_job_is_paused(run: RunFolder) -> None:
    run.attempt(Ending.STOPPED)
    found = status(run, job("PENDING", reason="BeginTime"))
    assert found.state is RunState.PAUSED
    assert (found.restarts.number, found.restarts.endings) == (1, {"stopped": 1})


def test_restarts_are_counted_with_what_they_cost(run: RunFolder) -> None:
    for ending in (Ending.STOPPED, Ending.KILLED, Ending.STOPPED, Ending.DONE):
        run.attempt(ending)
    found = status(run).restarts
    assert (found.number, found.endings) == (3, {"stopped": 2, "killed": 1})
    assert found.seconds_repeated > 0


def test_a_complete_run_is_finished(run: RunFolder) -> None:
    run.log(98)
    run.log(100, **{"val/top1": 0.75})
    run.checkpoint(100)
    found = status(run)
    assert (found.state, found.logged.results) == (RunState.FINISHED, {"val/top1": 0.75})


def test_the_last_step_without_its_checkpoint_is_not_finished(run: RunFolder) -> None:
    run.log(100)
    run.checkpoint(90)
    assert status(run).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (Ending.DONE, RunState.FINISHED),
        (Ending.STOPPED, RunState.STOPPED),
        (Ending.ENDED_BY_SLURM, RunState.STOPPED),
        (Ending.BAD_INPUT, RunState.FAILED),
        (None, RunState.FAILED),  # its node died, and no attempt followed
    ],
)
def test_the_last_attempt_says_how_a_run_ended(
    run: RunFolder, ending: Ending | None, state: RunState
) -> None:
    run.log(10)
    run.attempt(ending)
    assert status(run).state is state


def test_a_failure_has_its_node_and_error(run: RunFolder) -> None:
    run.task(0, 137, "resumed", ended=NOW)
    run.task(1, 1, "Traceback", "RuntimeError: no such tensor", "srun: ended", ended=NOW - 2)
    run.attempt(Ending.FAILED, "rank 1 on n2 ended with code 1", failed_nodes=("n2",))
    failure = status(run).failure
    assert failure is not None and failure.log is not None
    assert (failure.what, failure.nodes) == ("rank 1 on n2 ended with code 1", ("n2",))
    assert failure.error_line == "RuntimeError: no such tensor"
    assert failure.log.name == f"{JOB}_1_log.out"


def test_task_records_are_enough_for_a_failure(run: RunFolder) -> None:
    run.task(0, None, "step 1/2")
    run.task(1, 2, "error:", "data.path: there is no folder x", ended=NOW)
    found = status(run)
    assert found.state is RunState.FAILED and found.failure is not None
    assert found.failure.what == "rank 1 ended with code 2"
    assert found.failure.error_line == "data.path: there is no folder x"


def test_without_slurm_an_open_attempt_counts_as_running(run: RunFolder) -> None:
    run.attempt(None)
    found = status(run, jobs=None, note="squeue is not on PATH")
    assert (found.state, found.note) == (RunState.RUNNING, "squeue is not on PATH")


def test_a_held_lock_means_running(run: RunFolder) -> None:
    with open(run.folder / ".lock", "w") as file:
        assert lock_holder(run.folder) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holder(run.folder) == os.getpid()
        assert status(run, jobs=None).state is RunState.RUNNING
    assert status(run, jobs=None).state is RunState.NOT_STARTED


def test_tasks_of_an_array_are_counted(run: RunFolder) -> None:
    run.folder.joinpath(f"slurm/{JOB}/{JOB}_0_0_task.json").write_text(
        '{"rank": 0, "pid": 1, "exit_code": 0, "ended": 1.0}'
    )
    live = [job("RUNNING", job_id=f"{JOB}_1"), job("PENDING", job_id=f"{JOB}_2")]
    found = status(run, *live)
    assert found.tasks == {"running": 1, "queued": 1, "finished": 1}
    assert found.state is RunState.RUNNING
    assert status(run).state is RunState.FINISHED
