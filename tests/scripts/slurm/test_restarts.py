"""Jobs that start again on a real SLURM: killed ranks, dead nodes, early signals, and limits."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from launch.jobs.attempts import Ending, read_attempts
from tests.scripts.slurm.conftest import (
    breakable_python,
    wait_for_files,
    with_module,
    without_folder,
)
from tests.support.levels import skip_or_fail
from tests.support.runs import SHARDS
from tests.support.tables import every, rows
from tests.support.waiting import ROOT
from vitscale.config.errors import FailureKind
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.runs.launching import LaunchSettings

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LAUNCH = LaunchSettings(nodes=2, tasks_per_node=1, timeout_min=5, signal_delay_s=30)
FINAL_STATES = "COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL".split()

# Stand-ins for stages: each says that it runs, and in which attempt.
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
# Ends with an error when the file `lost` says that a peer is gone, as training does; then lives on.
WAITING = (
    BEGINNING
    + """
    if attempt > 1:
        time.sleep(75)
        sys.exit(0)
    while not (run / "lost").exists():
        time.sleep(0.05)
    sys.exit("no heartbeat from rank 1")
"""
)


def test_a_crash_loop_ends_with_the_reason_of_each(slurm, submit, tmp_path):
    job = submit(CRASHING)
    _, log = end_of(slurm, job, "FAILED", restarts=3)
    attempts = read_attempts(tmp_path)

    # The first one's checkpoint counts as progress, so it is not fruitless.
    assert [attempt.checkpoint_step for attempt in attempts] == [10] * 4
    for attempt in attempts:
        assert attempt.kind is FailureKind.KILLED
        assert attempt.failed_node == "n2"
    reason = re.escape("rank 1 on n2 was ended by SIGKILL (Killed)")
    assert "3 restarts in a row brought no newer checkpoint" in log
    assert len(re.findall(rf"  attempt \d, ended .* at step 10: {reason}", log)) == 4
    assert "launch.sbatch.exclude='n2'" in log

    # The job needs both.
    assert "n2 is not excluded: too few other nodes are up" in log

    # Each asks for an early start, instead of waiting for the old credential's end.
    decided = (slurm.folder / "slurmctld.log").read_text()
    begin = rf"setting begin to \S+ for JobId={job.job_id}\n"
    assert len(re.findall(begin, decided)) == 3


def end_of(slurm, job, state, *, restarts):
    """The controller's fields of a job that has ended so, and the job's log."""
    ended = slurm.wait(job.job_id, states=FINAL_STATES)
    # It says why, if the controller has it otherwise.
    log = job.log(0).read_text()
    assert ended["JobState"] == state, log
    assert ended["Restarts"] == str(restarts), log
    return ended, log


def test_a_node_that_the_job_asks_for_is_not_excluded(slurm, submit):
    """n1 is up, but without n2 the job would wait for ever."""
    # Two failures in a row on one node, after which it would be excluded.
    text = f"{BEGINNING}    attempt > 2 or os.kill(os.getpid(), signal.SIGKILL)"
    job = submit(text, nodes=1, sbatch={"nodelist": "n2"})
    ended, log = end_of(slurm, job, "COMPLETED", restarts=2)
    assert ended["ExcNodeList"] == "(null)"
    assert "n2 is not excluded: the job could not start" in log


def test_signals_in_the_first_second_requeue(slurm, submit, tmp_path):
    job = submit("import time; time.sleep(1000)", max_requeues=2)

    # From before the first process of the job to its handlers: whatever it is doing.
    while slurm.job(job.job_id)["JobState"] not in FINAL_STATES:
        slurm.run(["bash", "-c", f"scancel --signal=USR2 {job.job_id} || true"])
        time.sleep(0.1)
    ended, log = end_of(slurm, job, "FAILED", restarts=2)
    assert ended["ExitCode"] == "75:0"
    assert "launch.max_requeues=2 is reached" in log
    assert {attempt.ending for attempt in read_attempts(tmp_path)} == {Ending.STOPPED}
    # Of submitit, which handles these signals itself, and of Python.
    for text in ("completed successfully", "Bypassing signal", "Traceback"):
        assert text not in log


@pytest.mark.exhaustive  # SLURM itself waits for more than a minute
def test_a_node_that_returns_does_not_end_the_next_attempt(slurm, submit, tmp_path):
    job = submit(WAITING)
    wait_for_files(tmp_path, "ready-0-1", "ready-1-1")
    slurm.kill_node("n2")
    try:
        # srun ends its step, also on n2: SLURM gives up in 10 s, and tries again a minute later.
        (tmp_path / "lost").touch()
        time.sleep(15)

        # What SLURM does itself after SlurmdTimeout.
        slurm.run("scontrol update nodename=n2 state=down reason=died".split())
        slurm.wait(job.job_id, states=["PENDING"])
    finally:
        # ReturnToService=2: a node that registers is up again.
        slurm.start("n2")
    ended, log = end_of(slurm, job, "COMPLETED", restarts=1)
    assert ended["NumNodes"] == "2", log
    first, second = read_attempts(tmp_path)
    assert second.ending is Ending.DONE, first


# Which node lacks the interpreter, or the run folder, and how many nodes the job may have.
@rows("""
- [node, nodes, missing]
- [n1, 1, Python]
- [n2, 1-2, Python]
- [n2, 1-2, run]
""")
def test_a_node_that_cannot_start_a_task_is_left(
    slurm, submit, tmp_path, node, nodes, missing
):
    """n1 runs the batch script too, whose last lines are Python; n2 a task alone."""
    if subprocess.run(["unshare", "--mount", "true"]).returncode:
        skip_or_fail("cannot hide a folder from a node: only root may mount")

    def restart(without):
        slurm.kill(node)

        # It is idle again once it has answered.
        slurm.run(
            ["scontrol", "update", f"nodename={node}", "state=down", "reason=test"]
        )
        slurm.start(node, without=without)
        slurm.await_idle()

    hidden = {"Python": Path(sys.executable).parent, "run": tmp_path}
    restart(hidden[missing])
    try:
        # Ranks of the first two attempts wait, so only the faulty node can end them.
        text = f"{BEGINNING}    time.sleep(1000 if attempt < 3 else 0)"
        job = submit(text, nodes=nodes)
        ended, log = end_of(slurm, job, "COMPLETED", restarts=2)
    finally:
        restart(None)
    assert ended["NumNodes"] == "1", log
    assert ended["ExcNodeList"] == node
    assert not [*slurm.processes(SLURM_JOB_ID=job.job_id)]
    *failed, last = read_attempts(tmp_path)
    assert last.ending is Ending.DONE
    assert node not in last.nodes

    # On n1 nothing of ours ran that could have recorded an attempt: the script alone knows.
    no_python = f"{sys.executable}: No such file or directory"
    if node == "n1":
        assert not failed
        assert log.count(f"execve(): {no_python}") == 2
        assert log.count("Python did not start on n1") == 2
    else:
        reason = "rank 1 on n2: launch failed: Slurmd could not connect IO"
        if missing == "Python":
            reason = f"rank 1 on n2 could not start: {no_python}"
        assert [attempt.reason for attempt in failed] == [reason] * 2
        assert [attempt.failed_node for attempt in failed] == [node] * 2
        excluded = f"n2 is excluded from job {job.job_id}: its last two attempts"
        assert f"{excluded} failed there" in log


# A training that has its last checkpoint when its ranks end.
TRAINING = (
    BEGINNING
    + """
    from vitscale.distributed.events import record_start
    lock = run / ".lock"
    if rank == "0":
        record_start(run, first_step=0, total_steps=10)
        (run / "checkpoints/step-00000010").mkdir(parents=True)
        (run / "checkpoints/step-00000010/manifest.json").touch()
        lock.write_text("job")
    while not (run / "end").exists():
        time.sleep(0.05)
        lock.touch()
    if rank == "0":
        os.truncate(lock, 0)
"""
)


def test_an_end_that_srun_never_hears_of_is_found(slurm, submit, tmp_path, monkeypatch):
    # The script looks each second, and not each minute, whether the run has ended.
    monkeypatch.setattr("launch.jobs.submission.LOOK_S", 1)
    job = submit(TRAINING)
    wait_for_files(tmp_path, "ready-0-1", "ready-1-1")
    # The daemon of the step on n2 tells srun of the end of its task.
    rank_1 = {"SLURM_JOB_ID": job.job_id, "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}
    for process, _ in slurm.processes(**rank_1):
        parent = process.parent()
        if parent is not None and parent.name() == "slurmstepd":
            parent.kill()
    (tmp_path / "end").touch()
    _, log = end_of(slurm, job, "COMPLETED", restarts=0)
    assert log.count("srun is ended") == 1
    (attempt,) = read_attempts(tmp_path)
    assert attempt.ending is Ending.DONE


def test_a_run_folder_that_was_moved_does_not_come_back(slurm, submit, tmp_path):
    job = submit(f"{BEGINNING}    time.sleep(1000)")
    wait_for_files(tmp_path, "ready-0-1", "ready-1-1")
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    # As a rank that fails: a restart would begin the training anew in an empty folder.
    slurm.run(["scancel", "--signal=KILL", f"{job.job_id}.0"])
    ended = slurm.wait(job.job_id, states=FINAL_STATES)
    (path,) = moved.glob(f"slurm/{job.job_id}/*_0_log.out")
    log = path.read_text()
    assert ended["JobState"] == "FAILED", log
    assert ended["Restarts"] == "0", log
    assert f"not requeued: {tmp_path} was moved or removed" in log
    assert not tmp_path.exists()
    moved.rename(tmp_path)


# What torch does then, in a Python that has no GPU.
OLD_DRIVER = """
import warnings
import torch
torch.cuda.is_available = lambda: warnings.warn("the NVIDIA driver is too old")
"""
# The shell lines of a node that lacks something, the reason, and in how many attempts: a node is
# left at once where its rank knows that the others have what it lacks.
BROKEN_NODES = yaml.safe_load("""
GPU: [export CUDA_VISIBLE_DEVICES=0, torch finds none, 1]
driver: ["{driver}", driver is too old, 1]
TMPDIR: ["export TMPDIR={folder}", is not a folder that only you can use, 1]
data: ["{data}", manifest.json cannot be read, 1]
init: ["{weights}", start.pth, 1]
# Nothing of ours is in shared memory.
shared memory: ["{shared_memory}", "", 0]
package: ["{package}", "ImportError: half of it", 2]
memory: [ulimit -v 1500000, "", 2]
""")
# The model of configs/digits/finetune.yaml.
DIGITS = yaml.safe_load(
    "{image_size: 24, patch_size: 6, width: 192, depth: 4, num_heads: 3, mlp_width: 384}"
)
SETTINGS = """
schedule.epochs=null schedule.steps=2 schedule.warmup_steps=1 data.val_split=null evaluate=[]
tracking.uri=null launch.nodes=1-2 launch.timeout_min=10 output={folder} data.path={shards}
launch.python={python} engine.compile={compile} init={folder}/weights/start.pth
"""


@pytest.mark.exhaustive
@every(node="n1, n2")
@every(lacking=BROKEN_NODES)
def test_a_node_that_lacks_something_is_named_and_left(slurm, tmp_path, lacking, node):
    lines, reason, num_failed = BROKEN_NODES[lacking]
    # Rank 0 alone reads the weights, while all is well.
    if (lacking, node) == ("init", "n2"):
        num_failed = 0
    arch = ViTSettings(**DIGITS).resolved(num_classes=0)
    (tmp_path / "weights").mkdir()
    torch.save(build_model(arch, seed=0).state_dict(), tmp_path / "weights/start.pth")
    half_a_package = "raise ImportError('half of it')"
    words = {
        "folder": tmp_path,
        "shards": SHARDS,
        "python": breakable_python(tmp_path),
        # Only a compiled model needs a folder for its code.
        "compile": lacking == "TMPDIR",
        "driver": with_module(tmp_path, "sitecustomize", OLD_DRIVER),
        "package": with_module(tmp_path, "deepspeed", half_a_package),
        "data": without_folder(SHARDS),
        "weights": without_folder(tmp_path / "weights"),
        "shared_memory": without_folder(Path("/dev/shm")),
    }
    # The folder of another user, with the name of ours.
    foreign = tmp_path / f"vitscale-{os.getuid()}"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    (tmp_path / "nodes" / node).write_text(lines.format_map(words))
    output = slurm.script(
        "launch/slurm.py",
        "--config",
        ROOT / "configs/digits/finetune.yaml",
        *SETTINGS.format_map(words).split(),
        cwd=tmp_path,
    )
    job_id = output.partition("submitted job ")[2].partition(":")[0]
    ended = slurm.wait(job_id, states=FINAL_STATES)
    rank = int(node == "n2")
    log = (tmp_path / f"slurm/{job_id}/{job_id}_{rank}_log.out").read_text()
    *failed, last = read_attempts(tmp_path)
    assert ended["JobState"] == "COMPLETED", log
    assert last.ending is Ending.DONE, log
    assert len(failed) == num_failed, log
    if num_failed:
        assert ended["ExcNodeList"] == node
        assert reason in log
    for attempt in failed:
        assert attempt.failed_node == node, attempt
        assert attempt.failed_rank == rank, attempt
        assert f"rank {rank} on {node}" in attempt.reason, attempt
        assert reason in attempt.reason, attempt
