"""The demo model trains through SLURM on two nodes and is tracked."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import ROOT

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
