"""Jobs on a real SLURM: environment, collectives, exit codes, and the nodes that are free."""

import json

import pytest
import yaml

from launch.jobs.attempts import read_attempts
from tests.support.ranks.run_states import journal_rows
from tests.support.waiting import ROOT, wait_until
from vitscale.runs.launching import LaunchSettings

pytestmark = pytest.mark.slurm

LAUNCH = LaunchSettings(nodes=2, tasks_per_node=1, timeout_min=5, signal_delay_s=30)


def test_tasks_on_two_nodes_form_a_process_group(slurm, submit, tmp_path):
    # torch's own rendezvous, by the variables alone: 1 + 2 shows that both ranks were in it.
    job = submit("""
        import json, os, sys, pathlib
        import torch.distributed as dist
        import torch
        dist.init_process_group("gloo")
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "MASTER_PORT", "SLURMD_NODENAME"]
        seen = {name: os.environ[name] for name in names} | {"total": total.item()}
        path = pathlib.Path(sys.argv[2]).parent / f"seen-{os.environ['RANK']}.json"
        path.write_text(json.dumps(seen))
        dist.destroy_process_group()
    """)
    ended = slurm.wait(job.job_id, states=["COMPLETED", "FAILED"])
    logs = job.log(0).read_text() + job.log(1).read_text()
    assert ended["JobState"] == "COMPLETED", logs
    seen = []
    for rank in range(2):
        path = tmp_path / f"slurm/seen-{rank}.json"
        seen.append(json.loads(path.read_text()))

    # n1 is not a host name: the address comes from SLURM.
    equal = yaml.safe_load("""
    {WORLD_SIZE: "2", LOCAL_RANK: "0", LOCAL_WORLD_SIZE: "1", MASTER_ADDR: 127.0.0.1, total: 3.0}
    """)
    equal["MASTER_PORT"] = seen[0]["MASTER_PORT"]
    for rank, task in enumerate(seen):
        assert task.pop("RANK") == str(rank)
    nodes = {task.pop("SLURMD_NODENAME") for task in seen}
    assert nodes == {"n1", "n2"}
    assert seen == [equal, equal]


def test_a_failed_rank_ends_the_job_and_the_others(slurm, submit):
    job = submit("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(2)
        time.sleep(1000)
    """)

    # srun's own code is the highest of all tasks: that of the one that was ended.
    ended = slurm.wait(job.job_id, states=["FAILED"])
    log = job.log(0).read_text()
    assert ended["ExitCode"] == "2:0", log
    # Bad input is the same after a restart.
    assert ended["Restarts"] == "0", log


def test_only_the_settings_reach_slurm_and_unchanged(
    slurm, submit, tmp_path, monkeypatch
):
    # As if submitted inside another job.
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-3")
    # Every character that a shell or a line of #SBATCH could take for its own.
    comment = 'it\'s $(touch canary) `touch canary`; "quoted" # é'
    job = submit(
        """
        import os, sys
        seen = (os.environ["FROM_SETUP"], os.environ["CUDA_VISIBLE_DEVICES"], os.getcwd())
        sys.exit(seen != ("1", "0", os.environ["SLURM_SUBMIT_DIR"]))
        """,
        # As SBATCH_EXPORT=NONE: the tasks still get what the batch script sets.
        sbatch={"comment": comment, "export": "NONE", "chdir": "/", "parsable": True},
        # After it, a command that fails, or a variable that is not set, must not end the script.
        setup=("export FROM_SETUP=1", "set -eu"),
        gpu_request="none",
        gpus_per_node=1,
    )
    shown = slurm.run(["scontrol", "show", "job", job.job_id])
    assert f"Comment={comment}" in shown
    ended = slurm.wait(job.job_id, states=["COMPLETED", "FAILED"])
    assert ended["JobState"] == "COMPLETED"
    assert ended["NumTasks"] == "2"
    assert "Killed" not in job.log(0).read_text()
    # No shell has run the comment.
    assert not [*tmp_path.rglob("canary")]


@pytest.mark.slow
def test_a_run_takes_the_nodes_that_are_free(slurm, digits_shards, tmp_path):
    """Two, one and two again: each step has the samples that a single process takes."""

    def losses(name):
        rows = journal_rows(tmp_path / "runs" / name)
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    # A rate that does not depend on the number of steps, which only the end decides; and no
    # drop path, which is drawn for each rank, so that another number of ranks draws the same.
    settings = """
        data.val_split=null evaluate=[] tracking.uri=null tracking.log_every_steps=1
        schedule.epochs=null schedule.decay=constant schedule.final_lr=0 schedule.warmup_steps=2
        model.drop_path=0
    """

    def start(script, name, *more):
        return slurm.script(
            script,
            "--config",
            ROOT / "configs/digits/pretrain.yaml",
            f"name={name}",
            f"data.path={digits_shards}",
            *settings.split(),
            *more,
            cwd=tmp_path,
        )

    def wait_for_steps(*, restarts):
        before = max(losses("free"), default=0)

        def is_further():
            is_this = slurm.job(job_id)["Restarts"] == str(restarts)
            return is_this and max(losses("free"), default=0) > before + 3

        wait_until(is_further, else_say=slurm.logs, every_s=0.2)

    launch = ("launch.nodes=1-2", "launch.timeout_min=10")
    output = start("launch/slurm.py", "free", "schedule.steps=10000", *launch)
    job_id = output.partition("submitted job ")[2].partition(":")[0]
    try:
        # Each signal requeues the job: first with one node, then with both again.
        for restarts, state in enumerate(("drain", "resume")):
            wait_for_steps(restarts=restarts)
            slurm.run(
                ["scontrol", "update", "nodename=n2", f"state={state}", "reason=test"]
            )
            slurm.run(["scancel", "--signal=USR2", job_id])
        wait_for_steps(restarts=2)
    finally:
        slurm.run(["scancel", job_id])
        slurm.wait(job_id, states=["CANCELLED"])

    # As many as its SLURM task has CPUs.
    log = tmp_path / f"runs/free/slurm/{job_id}/{job_id}_0_log.out"
    assert "CPU threads per rank: 1\n" in log.read_text()
    attempts = read_attempts(tmp_path / "runs/free")
    assert [len(attempt.nodes) for attempt in attempts] == [2, 1, 2]
    # One process with the same global batch: level R3 of docs/reliability.md.
    steps = f"schedule.steps={max(losses('free'))}"
    start("launch/local.py", "alone", steps, "--num-procs", 1)
    assert losses("free") == pytest.approx(losses("alone"), rel=1e-5)
