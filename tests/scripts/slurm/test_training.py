"""The demo model trains through SLURM on two nodes and is tracked, and on what is free."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from launch.jobs.attempts import read_attempts
from tests.support.waiting import ROOT, wait_until

pytestmark = pytest.mark.slurm

STEPS = 6


def test_the_demo_model_trains_on_two_nodes(slurm, digits_shards: Path, tmp_path: Path) -> None:
    command = (
        "--config", ROOT / "configs/digits/pretrain.yaml",
        "name=slurm-demo", "output=runs/slurm-demo", f"data.path={digits_shards}",
        "data.global_batch=8",
        "tracking.uri=sqlite:///runs/mlflow.db", "tracking.log_every_steps=2",
        "schedule.epochs=null", f"schedule.steps={STEPS}", "schedule.warmup_steps=2",
        "launch.nodes=2", "launch.tasks_per_node=1", "launch.timeout_min=10",
    )  # fmt: skip
    output = slurm.script("launch/slurm.py", *command, cwd=tmp_path)
    found = re.search(r"submitted job (\d+)", output)
    assert found, output
    job_id = found[1]
    log = tmp_path / f"runs/slurm-demo/slurm/{job_id}/{job_id}_0_log.out"
    assert str(log) in output
    ended = slurm.wait(job_id, states=["COMPLETED", "FAILED"])
    assert ended["JobState"] == "COMPLETED", log.read_text()
    assert ended["NumNodes"] == "2"

    run = tmp_path / "runs/slurm-demo"
    lines = log.read_text()
    assert "2 task(s), config " in lines
    # As many as its SLURM task has CPUs.
    assert "CPU threads per rank: 1\n" in lines
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert "train/loss" in json.dumps(journal)
    assert (run / "config.yaml").exists()
    assert [path.name for path in run.glob(f"checkpoints/step-{STEPS:08d}")]
    assert not (tmp_path / "runs/mlflow.db").exists()
    slurm.script("launch/compare.py", "sync", "runs/slurm-demo", cwd=tmp_path)
    assert_tracked(tmp_path / "runs/mlflow.db", steps=STEPS)


def assert_tracked(database: Path, *, steps: int) -> None:
    """Exactly one finished MLflow run, whose loss was logged up to the last step."""
    with sqlite3.connect(database) as connection:
        runs = connection.execute("select name, status from runs").fetchall()
        logged = connection.execute("select max(step) from metrics where key = 'train/loss'")
        assert runs == [("slurm-demo", "FINISHED")]
        assert logged.fetchall() == [(steps,)]


@pytest.mark.slow
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
    attempts = read_attempts(tmp_path / "runs/free")
    assert [len(attempt.nodes) for attempt in attempts] == [2, 1, 2]
    start("launch/local.py", "alone", f"schedule.steps={max(losses('free'))}", "--num-procs", 1)
    assert losses("free") == pytest.approx(losses("alone"), rel=1e-5)
