"""`launch/slurm.py` on a machine without SLURM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """\
stage: pretrain
name: small
data: {path: shards, global_batch: 64, planned_num_samples: 1000}
model: {preset: Ti/16, num_classes: 10}
optim: {lr: 0.001}
schedule: {epochs: 10, warmup_steps: 5, decay: linear}
launch: {nodes: 2, tasks_per_node: 4, gpus_per_node: 4}
"""
DATA_CONFIG = """\
stage: data_prep
output: shards
source: {path: images}
launch: {num_tasks: 64, cpus_per_task: 8}
"""


@pytest.fixture
def launch(tmp_path):
    """Run launch/slurm.py in an empty folder, with a PATH that holds no SLURM."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "data.yaml").write_text(DATA_CONFIG)
    environment = {**os.environ, "PATH": str(tmp_path / "nothing")}

    def call(*arguments: str, config: str = "run.yaml") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "launch/slurm.py"), "--config", config, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip

    return call


def rows(output: str) -> dict[str, str]:
    """The lines of the plan, by name."""
    plan = output.partition("# Plan\n")[2].partition("\n\n")[0]
    return dict(re.split(r"  +", line, maxsplit=1) for line in plan.splitlines())


def test_a_dry_run_shows_the_plan_and_writes_nothing(launch, tmp_path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = launch("--dry-run", "optim.lr=0.002")
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert "lr: 0.002" in done.stdout
    plan = rows(done.stdout)
    assert plan["batch"] == "global batch 64 = 8 ranks x 8 images x 1 accumulated"
    assert plan["steps"] == "156 steps, 9,984 images = 9.984 epochs"
    assert "0 to 0.002 over 5 warm-up steps, then linear to 0 at step 156" in plan["learning rate"]
    assert plan["data"].startswith("1,000 training images, from data.planned_num_samples")
    assert plan["model"].startswith("5,526,346 parameters, 197 tokens, 10 classes")
    assert "GFLOPs per training image" in plan["compute"]
    assert "GiB" in plan["memory per GPU"]
    checks = done.stdout.partition("# Checks\n")[2].partition("\n\n")[0]
    assert "data           warning  no manifest.json in shards here" in checks
    assert "SLURM" not in checks


def test_submitting_without_slurm_names_alternatives(launch, tmp_path) -> None:
    done = launch()
    assert done.returncode == 2
    assert "no SLURM on this machine" in done.stderr
    assert "launch/local.py" in done.stderr and "--dry-run" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_errors_of_the_job_are_reported_together(launch) -> None:
    done = launch("launch.nodes=3", "launch.gpus_per_node=0", "engine.device=cuda")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "64 images are not divisible by 12 tasks" in done.stderr
    assert "60 or 72" in done.stderr
    assert "launch.gpus_per_node" in done.stderr


def test_data_preparation_is_shown_as_an_array(launch, tmp_path) -> None:
    done = launch("--dry-run", "launch.max_running_tasks=16", config="data.yaml")
    assert done.returncode == 0, done.stderr
    plan = rows(done.stdout)
    assert plan["images"] == "images" and plan["shards"] == "shards"
    assert plan["tasks"].startswith("64 task(s) x 8 core(s) = 512 core(s), as a SLURM array")
    assert plan["tasks"].endswith("at most 16 task(s) at a time")
    assert "#SBATCH --array=0-63%16" in done.stdout
    # A task uses the cores that it requested, not all that the node has.
    assert "\nnum_workers: 8\n" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_what_slurm_says(launch, tmp_path) -> None:
    sbatch = tmp_path / "nothing/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        "#!/bin/sh\n"
        "[ $1 = --test-only ] || exit 9\n"
        "while read line; do [ \"$line\" = '#SBATCH --nodes=2' ] && exit 0; done\n"
        "echo 'allocation failure: no such nodes' >&2\n"
        "exit 1\n"
    )
    sbatch.chmod(0o755)
    done = launch("--dry-run", "launch.nodes=4")
    assert done.returncode == 0, done.stderr
    assert "SLURM          warning  sbatch --test-only: allocation failure: no such" in done.stdout
    assert "SLURM          ok " in launch("--dry-run").stdout
