"""Jobs that start again on a real SLURM: killed ranks, dead nodes, early signals, and limits."""

from __future__ import annotations

import re
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch.jobs.attempts import Ending, read_attempts
from launch.jobs.job import StageJob
from launch.jobs.submission import Submission, submit_to_slurm
from tests.support.waiting import wait_until
from vitscale.config.errors import FailureKind
from vitscale.distributed.processes import is_alive
from vitscale.runs.launching import LaunchSettings

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LAUNCH = LaunchSettings(nodes=2, tasks_per_node=1, timeout_min=5, signal_delay_s=30)
FINAL_STATES = ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"]

BEGINNING = """
    import os, pathlib, signal, sys, time
    run = pathlib.Path(sys.argv[2]).parent.parent
    rank = os.environ["RANK"]
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", 0)) + 1
    (run / f"ready-{rank}-{attempt}").touch()
"""
# Gains a checkpoint, then its rank 1 is killed at every start.
CRASHING = (
    BEGINNING
    + """
    if rank == "0" and attempt == 1:
        checkpoint = run / "checkpoints/step-00000010"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
        (run / "saved").touch()
    while not (run / "saved").exists():
        time.sleep(0.05)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
)
# Ends with an error when the file `lost` says that a peer is gone, as training does.
WAITING = (
    BEGINNING
    + """
    if attempt > 1:
        sys.exit(0)
    while not (run / "lost").exists():
        time.sleep(0.05)
    sys.exit("no heartbeat from rank 1")
"""
)

# Saves when SLURM ends it.
SAVING = (
    BEGINNING
    + """
    def save(*_):
        if rank == "1":
            checkpoint = run / f"checkpoints/step-{attempt:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "manifest.json").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    (run / f"pid-{rank}-{attempt}").write_text(str(os.getpid()))
    time.sleep(1000)
"""
)
# The device of rank 1 fails, which rank 0 notices and ends first. Then the training diverges.
FAILING_DEVICE = (
    BEGINNING
    + """
    from vitscale.config.errors import FailureKind
    from vitscale.distributed.failures.events import Failure, record_failure
    def report(kind, what):
        failure = Failure(kind=kind, what=what, rank=int(rank), node="host", reported_by=int(rank))
        record_failure(run, failure)
    if attempt == 2:
        report(FailureKind.DIVERGED, "losses are not finite")
        sys.exit(76)
    if rank == "1":
        report(FailureKind.DEVICE, "rank 1 fell off the bus")
        time.sleep(1000)
    while "bus" not in (run / "events.jsonl").read_text():
        time.sleep(0.05)
    report(FailureKind.PEER_LOST, "connection closed")
    sys.exit(1)
"""
)
# Killed at every start on the node where it was first.
BAD_NODE = (
    BEGINNING
    + """
    node = os.environ["SLURMD_NODENAME"]
    if attempt == 1:
        (run / "bad").write_text(node)
    if (run / "bad").read_text() == node:
        os.kill(os.getpid(), signal.SIGKILL)
    (run / "good").write_text(node)
"""
)


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch):
    """Submit a stand-in script as a stage of the run in tmp_path."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    folder = tmp_path / "slurm"
    folder.mkdir()

    def submit_script(text: str, **changes: object) -> Submission:
        script = folder / "main.py"
        script.write_text(textwrap.dedent(text))
        config = folder / "config.yaml"
        config.touch()
        job = StageJob(script=str(script), config=str(config), run_folder=str(tmp_path))
        launch = LAUNCH.model_copy(update=changes)
        return submit_to_slurm(job, launch=launch, name="stand-in", folder=folder)

    return submit_script


def wait_for_file(path: Path) -> None:
    wait_until(path.exists, else_say=lambda: f"no {path} in {sorted(path.parent.iterdir())}")


def test_a_crash_loop_ends_with_the_reason_of_each(slurm, submit, tmp_path) -> None:
    job = submit(CRASHING, max_fruitless_restarts=2)
    ended = slurm.wait(job.job_id, states=["FAILED", "COMPLETED"])
    log = job.log(0).read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "2"), log
    attempts = read_attempts(tmp_path)
    # The first one's checkpoint counts as progress, so it is not fruitless.
    assert [attempt.steps_gained for attempt in attempts] == [10, 0, 0]
    assert {attempt.ending for attempt in attempts} == {Ending.KILLED}
    assert {attempt.failed_nodes for attempt in attempts} == {("n2",)}
    reason = "rank 1 on n2 was ended by SIGKILL (Killed)"
    assert "2 restarts in a row brought no newer checkpoint" in log
    assert len(re.findall(rf"  attempt \d, ended .* at step 10: {re.escape(reason)}", log)) == 3
    assert "launch.exclude='n2'" in log
    # Each attempt's record of each task is kept.
    assert sorted(path.name for path in job.folder.glob("*_1_task*")) == [
        f"{job.job_id}_1_task.json", f"{job.job_id}_1_task_1.json", f"{job.job_id}_1_task_2.json"
    ]  # fmt: skip


def test_bad_input_is_not_retried(slurm, submit, tmp_path) -> None:
    job = submit("import sys; sys.exit(2)")
    ended = slurm.wait(job.job_id, states=["FAILED", "COMPLETED"])
    assert (ended["Restarts"], ended["ExitCode"]) == ("0", "2:0"), job.log(0).read_text()
    assert [attempt.ending for attempt in read_attempts(tmp_path)] == [Ending.BAD_INPUT]


def test_signals_in_the_first_second_requeue(slurm, submit, tmp_path) -> None:
    job = submit("import time; time.sleep(1000)", max_requeues=2)
    # From before the first process of the job to its handlers: whatever it is doing.
    while slurm.job(job.job_id)["JobState"] not in FINAL_STATES:
        slurm.run(["bash", "-c", f"scancel --signal=USR2 {job.job_id} || true"])
        time.sleep(0.1)
    ended, log = slurm.job(job.job_id), job.log(0).read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "2"), log
    assert ended["ExitCode"] == "75:0"
    assert "launch.max_requeues=2 is reached" in log
    assert {attempt.ending for attempt in read_attempts(tmp_path)} == {Ending.STOPPED}
    for text in ("completed successfully", "Bypassing signal", "Traceback"):
        assert text not in log


def test_slurm_requeues_after_a_node_has_died(slurm, submit, tmp_path) -> None:
    job = submit(WAITING)
    for rank in range(2):
        wait_for_file(tmp_path / f"ready-{rank}-1")
    slurm.kill_node("n2")
    try:
        # What SLURM does itself after SlurmdTimeout.
        slurm.run(["scontrol", "update", "nodename=n2", "state=down", "reason=died"])
        slurm.wait(job.job_id, states=["PENDING"])
    finally:
        # ReturnToService=2: a node that registers is up again.
        slurm.start_node("n2")
    ended = slurm.wait(job.job_id, states=["COMPLETED", "FAILED"])
    log = job.log(0).read_text()
    assert (ended["JobState"], ended["Restarts"], ended["NumNodes"]) == ("COMPLETED", "1", "2"), log
    first, second = read_attempts(tmp_path)
    assert second.ending is Ending.DONE, first


def supervisor_of(slurm, job_id: str) -> psutil.Process:
    """The process that supervises the job."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.environ()
            if (own.get("SLURM_CONF"), own.get("SLURM_JOB_ID")) == (
                slurm.environment["SLURM_CONF"], job_id,
            ) and "launch.jobs.supervision" in process.cmdline():  # fmt: skip
                return process
    raise AssertionError(f"no supervisor of job {job_id}")


def test_without_a_supervisor_the_script_requeues(slurm, submit, tmp_path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    # At its first start, no Python starts; at the second, the supervisor is killed.
    job = submit(
        SAVING,
        max_requeues=2,
        setup=(f"if rm {broken}; then export PYTHONHOME=/nowhere; fi 2>/dev/null",),
    )
    for restart in (1, 2):
        for rank in range(2):
            wait_for_file(tmp_path / f"pid-{rank}-{restart + 1}")
        supervisor_of(slurm, job.job_id).kill()
    ended = slurm.wait(job.job_id, states=["FAILED", "COMPLETED", "CANCELLED"])
    log = job.log(0).read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "2"), log
    said = f"requeueing job {job.job_id}: its supervisor did not start, or was killed"
    assert log.count(said) == 2, log
    first, second = read_attempts(tmp_path)
    assert (first.restart, first.ending, second.restart) == (1, Ending.LOST, 2)
    # It resumes from what was saved when SLURM ended the tasks.
    assert second.first_step == 2
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    wait_until(lambda: not any(map(is_alive, pids)), else_say=lambda: f"{pids} run")


def test_the_recorded_cause_is_blamed(slurm, submit, tmp_path) -> None:
    job = submit(FAILING_DEVICE)
    ended = slurm.wait(job.job_id, states=["FAILED", "COMPLETED"])
    log = job.log(0).read_text()
    # Diverged training is not started again.
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "1", "76:0"), log
    first, second = read_attempts(tmp_path)
    assert (first.ending, first.kind) == (Ending.FAILED, FailureKind.DEVICE)
    assert first.failed_nodes == ("n2",) and "fell off the bus" in first.reason
    assert (second.ending, second.exit_code) == (Ending.DIVERGED, 76)


def test_a_node_that_two_attempts_blame_is_left(slurm, submit, tmp_path) -> None:
    job = submit(BAD_NODE, nodes=1)
    ended = slurm.wait(job.job_id, states=FINAL_STATES)
    assert ended["JobState"] == "COMPLETED", slurm.logs()
    bad, good = ((tmp_path / name).read_text() for name in ("bad", "good"))
    assert ended["ExcNodeList"] == bad != good
    assert [a.ending for a in read_attempts(tmp_path)] == [
        Ending.KILLED,
        Ending.KILLED,
        Ending.DONE,
    ]
    text = f"{bad} is excluded from job {job.job_id}: its last two attempts failed there"
    assert text in job.log(0).read_text()


def test_a_bad_node_stays_where_the_job_needs_all(slurm, submit, tmp_path) -> None:
    job = submit(CRASHING, max_requeues=2)
    slurm.wait(job.job_id, states=FINAL_STATES)
    assert "is not excluded: too few other nodes are up" in job.log(0).read_text()
