"""Independent tasks as a job array on a real SLURM: each is stopped and requeued alone."""

from __future__ import annotations

import pytest

from tests.integration.slurm.conftest import wait_for_files
from vitscale.runs.launching import LaunchSettings

pytestmark = pytest.mark.slurm

# Two tasks fill one of the nodes, which have four cores.
LAUNCH = LaunchSettings(
    num_tasks=4,
    cpus_per_task=2,
    timeout_min=5,
    signal_delay_s=30,
    max_requeues=3,
    max_fruitless_restarts=0,
)
FINAL_STATES = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")

# Task 0 ends when the file `end` exists; the others wait for a signal, and end in a second attempt.
STOPPABLE = """
    import os, pathlib, signal, sys, time
    stop = []
    for name in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.append(1))
    folder = pathlib.Path(sys.argv[2]).parent
    index = os.environ["SLURM_ARRAY_TASK_ID"]
    # The only rank of its job: otherwise a script would leave its error message to rank 0.
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    if (folder / f"ready-{index}").exists():
        sys.exit(0)
    (folder / f"ready-{index}").touch()
    while not stop:
        if index == "0" and (folder / "end").exists():
            sys.exit(0)
        time.sleep(0.05)
    sys.exit(75)
"""


def test_a_stopped_task_is_requeued_alone(slurm, submit, tmp_path) -> None:
    job = submit(STOPPABLE, independent=True)
    folder = tmp_path / "slurm"
    wait_for_files(folder, *(f"ready-{task}" for task in range(4)))
    # As at the time limit; and as SLURM does for a preemption, before the task can requeue.
    slurm.run(["scancel", "--signal=USR2", f"{job.job_id}_1"])
    slurm.run(["scontrol", "requeue", f"{job.job_id}_2"])
    slurm.run(["scancel", f"{job.job_id}_3"])
    assert "RUNNING" == slurm.job(f"{job.job_id}_0")["JobState"]
    for task in (1, 2):
        slurm.wait(f"{job.job_id}_{task}", states=["COMPLETED"])
    (folder / "end").touch()
    ended = [slurm.wait(f"{job.job_id}_{task}", states=FINAL_STATES) for task in range(4)]
    assert [task["JobState"] for task in ended] == ["COMPLETED"] * 3 + ["CANCELLED"]
    assert [task["Restarts"] for task in ended] == ["0", "1", "1", "0"]
    logs = [job.log(task).read_text() for task in range(4)]
    assert f"requeueing job {job.job_id}_1 (1 of 3)" in logs[1]
    assert all("attempt 2" in logs[task] for task in (1, 2))
    # SLURM requeues one and cancels the other.
    for task in (2, 3):
        assert f"SLURM is ending job {job.job_id}_{task}" in logs[task]
    assert "slurm: 1 task(s), config " in logs[3]
    assert not [log for log in logs if "Traceback" in log]
