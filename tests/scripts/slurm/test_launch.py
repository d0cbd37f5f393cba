"""Jobs on a real SLURM: environment, collectives, exit codes, and the nodes that are free."""

import json

import pytest

from launch.jobs.attempts import read_attempts
from tests.support.waiting import ROOT, wait_until
from vitscale.runs.launching import LaunchSettings

pytestmark = pytest.mark.slurm

LAUNCH = LaunchSettings(nodes=2, tasks_per_node=1, timeout_min=5, signal_delay_s=30)


def test_tasks_on_two_nodes_form_a_process_group(slurm, submit, tmp_path):
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
    assert ended["JobState"] == "COMPLETED", (
        job.log(0).read_text() + job.log(1).read_text()
    )
    seen = [
        json.loads((tmp_path / f"slurm/seen-{rank}.json").read_text())
        for rank in range(2)
    ]

    # n1 is not a host name: the address comes from SLURM.
    equal = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "total": 3.0,
    }
    equal |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": seen[0]["MASTER_PORT"]}
    assert [task | equal for task in seen] == seen
    assert [task["RANK"] for task in seen] == ["0", "1"]
    assert {task["SLURMD_NODENAME"] for task in seen} == {"n1", "n2"}


def test_a_failed_rank_ends_the_job_and_the_others(slurm, submit):
    job = submit("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(2)
        time.sleep(1000)
    """)

    # srun's own code is the highest of all tasks: that of the one that was ended.
    ended = slurm.wait(job.job_id, states=["FAILED"])
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0"), job.log(
        0
    ).read_text()


def test_only_the_settings_reach_slurm_and_unchanged(
    slurm, submit, tmp_path, monkeypatch
):
    # As if submitted inside another job.
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "7",
        "SBATCH_ARRAY_INX": "0-3",
    }.items():
        monkeypatch.setenv(name, value)
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
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.slow
def test_a_run_takes_the_nodes_that_are_free(slurm, digits_shards, tmp_path):
    """Two, one and two again: each step has the samples that a single process takes."""

    def losses(name):
        path = tmp_path / f"runs/{name}/journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def start(script, name, *more):
        settings = (
            "--config", ROOT / "configs/digits/pretrain.yaml", f"name={name}",
            f"data.path={digits_shards}", "data.val_split=null", "evaluate=[]", "tracking.uri=null",
            "tracking.log_every_steps=1", "schedule.epochs=null", "schedule.decay=constant",
            "schedule.final_lr=0", "schedule.warmup_steps=2", "model.drop_path=0",
        )  # fmt: skip
        return slurm.script(script, *settings, *more, cwd=tmp_path)

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
    start(
        "launch/local.py",
        "alone",
        f"schedule.steps={max(losses('free'))}",
        "--num-procs",
        1,
    )
    assert losses("free") == pytest.approx(losses("alone"), rel=1e-5)
