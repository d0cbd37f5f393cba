"""Jobs that start again on a real SLURM: killed ranks, dead nodes, early signals, and limits."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

import pytest

from launch.jobs.attempts import Ending, read_attempts
from launch.jobs.job import StageJob
from launch.jobs.submission import Submission, submit_to_slurm
from tests.support.waiting import wait_until
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

# Fails wherever its first attempt runs.
FAILING_ON_ONE_NODE = (
    BEGINNING
    + """
    with open(run / "ports", "a") as file:
        print(os.environ["MASTER_PORT"], file=file)
    bad = run / "bad"
    if attempt == 1:
        bad.write_text(os.environ["SLURMD_NODENAME"])
    if os.environ["SLURMD_NODENAME"] == bad.read_text():
        os.kill(os.getpid(), signal.SIGKILL)
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


def test_a_node_that_failed_twice_is_excluded(slurm, submit, tmp_path) -> None:
    job = submit(FAILING_ON_ONE_NODE, nodes=1, exclude_failed_nodes=True)
    ended = slurm.wait(job.job_id, states=["FAILED", "COMPLETED"])
    log = job.log(0).read_text()
    bad = (tmp_path / "bad").read_text()
    assert (ended["JobState"], ended["ExcNodeList"]) == ("COMPLETED", bad), log
    attempts = read_attempts(tmp_path)
    assert [attempt.failed_nodes for attempt in attempts] == [(bad,), (bad,), ()]
    assert attempts[-1].nodes == ({"n1": "n2", "n2": "n1"}[bad],)
    assert f"nodes excluded from now on: {bad}" in log
    # A port that another process took must not fail the next attempt too.
    assert len(set((tmp_path / "ports").read_text().split())) == 3


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


def test_a_dead_node_is_named_and_left_at_once(slurm, submit, tmp_path) -> None:
    job = submit(WAITING)
    for rank in range(2):
        wait_for_file(tmp_path / f"ready-{rank}-1")
    slurm.kill_node("n2")
    try:
        (tmp_path / "lost").touch()
        # SLURM itself gives the node up after five minutes.
        slurm.wait(job.job_id, states=["PENDING"])
        assert "down" not in slurm.run(["sinfo", "--noheader", "--nodes=n2", "--format=%T"])
    finally:
        slurm.start_node("n2")
    ended = slurm.wait(job.job_id, states=["COMPLETED", "FAILED"])
    log = job.log(0).read_text()
    assert (ended["JobState"], ended["Restarts"], ended["NumNodes"]) == ("COMPLETED", "1", "2"), log
    assert "n2 died (does not answer SLURM), and with it rank 1" in log
    first, second = read_attempts(tmp_path)
    assert (first.ending, first.failed_nodes) == (Ending.NODE_FAILED, ("n2",))
    assert (second.ending, second.nodes) == (Ending.DONE, ("n1", "n2"))
