"""A model trains through SLURM on the nodes that are free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.jobs.attempts import read_attempts
from tests.support.waiting import ROOT, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_takes_the_nodes_that_are_free(slurm, digits_shards: Path, tmp_path: Path) -> None:
    """Two, one and two again: each step has the samples that a single process takes."""

    def losses(name: str) -> dict[int, float]:
        path = tmp_path / f"runs/{name}/journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def start(script: str, name: str, *more: object) -> str:
        settings = (
            "--config", ROOT / "configs/digits/pretrain.yaml", f"name={name}",
            f"data.path={digits_shards}", "data.val_split=null", "evaluate=[]", "tracking.uri=null",
            "tracking.log_every_steps=1", "schedule.epochs=null", "schedule.decay=constant",
            "schedule.final_lr=0", "schedule.warmup_steps=2", "model.drop_path=0",
        )  # fmt: skip
        return slurm.script(script, *settings, *more, cwd=tmp_path)

    def wait_for_steps(*, restarts: int) -> None:
        before = max(losses("free"), default=0)

        def is_further() -> bool:
            is_this = slurm.job(job_id)["Restarts"] == str(restarts)
            return is_this and max(losses("free"), default=0) > before + 3

        wait_until(is_further, else_say=slurm.logs, every_s=0.2)

    launch = ("launch.nodes=1-2", "launch.timeout_min=10")
    output = start("launch/slurm.py", "free", "schedule.steps=10000", *launch)
    job_id = output.partition("submitted job ")[2].partition(":")[0]
    try:
        for restarts, state in enumerate(("drain", "resume")):
            wait_for_steps(restarts=restarts)
            slurm.run(["scontrol", "update", "nodename=n2", f"state={state}", "reason=test"])
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
    start("launch/local.py", "alone", f"schedule.steps={max(losses('free'))}", "--num-procs", 1)
    assert losses("free") == pytest.approx(losses("alone"), rel=1e-5)
