"""Independent tasks as a job array on a real SLURM: sharing work, failing, being requeued."""

from __future__ import annotations

import json

import pytest

from launch.jobs.submission import Submission
from tests.integration.slurm.conftest import wait_for_files
from vitscale.config.errors import UserError
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

SHARING = """
    import json, os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[2]).parent
    index = os.environ["SLURM_ARRAY_TASK_ID"]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME", "SLURM_CPUS_PER_TASK"]
    seen = {name: os.environ[name] for name in names}
    (folder / f"seen-{index}.json").write_text(json.dumps(seen))
    if index == "3":
        sys.exit(2)
    while len(list(folder.glob("seen-*.json"))) < 4:
        time.sleep(0.05)
    for unit in range(9):
        try:
            (folder / f"unit-{unit}").touch(exist_ok=False)
        except FileExistsError:
            continue
        with open(folder / "units.txt", "a") as file:
            file.write(f"{unit}\\n")
        time.sleep(0.05)
"""

# Task 0 ends when the file `end` exists; the others wait for a signal, and end in a second attempt.
STOPPABLE = """
    import os, pathlib, signal, sys, time
    stop = []
    for name in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.append(1))
    folder = pathlib.Path(sys.argv[2]).parent
    index = os.environ["SLURM_ARRAY_TASK_ID"]
    if (folder / f"ready-{index}").exists():
        sys.exit(0)
    (folder / f"ready-{index}").touch()
    while not stop:
        if index == "0" and (folder / "end").exists():
            sys.exit(0)
        time.sleep(0.05)
    sys.exit(75)
"""


def wait_for_all(slurm, job: Submission) -> list[dict[str, str]]:
    """The controller's fields of every task at its end."""
    return [
        slurm.wait(f"{job.job_id}_{task}", states=FINAL_STATES) for task in range(job.num_tasks)
    ]


def test_tasks_are_jobs_and_continue_when_one_fails(slurm, submit, tmp_path) -> None:
    job = submit(SHARING, independent=True)
    ended = wait_for_all(slurm, job)
    logs = [job.log(task).read_text() for task in range(4)]
    assert [task["JobState"] for task in ended] == ["COMPLETED"] * 3 + ["FAILED"], logs
    assert ended[3]["ExitCode"] == "2:0"
    assert "slurm: task 3 (4 in total), config " in logs[3]

    units = (tmp_path / "slurm/units.txt").read_text().split()
    assert sorted(units) == [str(unit) for unit in range(9)]
    seen = [json.loads((tmp_path / f"slurm/seen-{task}.json").read_text()) for task in range(4)]
    assert {task["SLURMD_NODENAME"] for task in seen} == {"n1", "n2"}
    # The only rank of its job: otherwise a script would leave its error message to rank 0.
    assert {(task["RANK"], task["LOCAL_RANK"], task["WORLD_SIZE"]) for task in seen} == {
        ("0", "0", "1")
    }
    assert {task["SLURM_CPUS_PER_TASK"] for task in seen} == {"2"}


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
    ended = wait_for_all(slurm, job)
    assert [task["JobState"] for task in ended] == ["COMPLETED"] * 3 + ["CANCELLED"]
    assert [task["Restarts"] for task in ended] == ["0", "1", "1", "0"]
    logs = [job.log(task).read_text() for task in range(4)]
    assert f"requeueing job {job.job_id}_1 (1 of 3)" in logs[1]
    assert all("attempt 2" in logs[task] for task in (1, 2))
    # SLURM requeues one and cancels the other.
    for task in (2, 3):
        assert f"SLURM is ending job {job.job_id}_{task}" in logs[task]
    assert not [log for log in logs if "Traceback" in log]


def test_a_refused_array_leaves_nothing(submit, tmp_path) -> None:
    # SLURM's default limit (MaxArraySize) is 1001.
    with pytest.raises(UserError, match="(?s)sbatch refused.*array"):
        submit("", independent=True, num_tasks=1500)
    assert sorted(path.name for path in (tmp_path / "slurm").iterdir()) == [
        "config.yaml",
        "main.py",
    ]
