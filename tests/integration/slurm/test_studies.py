"""A study as arrays on a real SLURM: transfers wait for their pre-trainings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.corpora.small_shards import make_shard_folder
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
RUN = """\
stage: {stage}
name: tiny
data: {{path: shards, global_batch: 2, num_workers: 0}}
model: {{image_size: 8, patch_size: 4, width: 8, depth: 1, num_heads: 1, mlp_width: 8}}
optim: {{lr: 0.001}}
schedule: {{steps: 2}}
engine: {{device: cpu, zero_stage: 0, num_threads: 1}}
tracking: {{uri: null}}
launch: {{timeout_min: 10}}
"""
STUDY = """\
stage: study
name: small
pretrain: {file: pretrain.yaml}
finetune: {file: finetune.yaml}
axes:
  - name: model
    values:
      - {label: narrow}
      - {label: wide, overrides: [model.width=16]}
figures:
  - {name: models, x: model, series: model}
"""


def test_a_study_is_trained_as_two_arrays(slurm, tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards")
    for stage in ("pretrain", "finetune"):
        (tmp_path / f"{stage}.yaml").write_text(RUN.format(stage=stage))
    (tmp_path / "study.yaml").write_text(STUDY)

    (tmp_path / "too_large.yaml").write_text(
        STUDY.replace("model.width=16", "launch.cpus_per_task=99").replace("small", "too-large")
    )

    def study(file: str = "study.yaml") -> str:
        done = subprocess.run(
            [sys.executable, ROOT / "launch/slurm.py", "--study", file],
            cwd=tmp_path, env=slurm.environment, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        return done.stdout + done.stderr

    output = study("too_large.yaml")
    assert "99 cores per node exceed the limit of partition" in output, output
    assert "submitted" not in output
    output = study()
    submitted = re.findall(r"submitted small-(\w+): array of 2 tasks (\d+)", output)
    assert [stage for stage, _ in submitted] == ["pretrain", "finetune"], output
    again = study()
    assert "submitted" not in again and again.count("kept ") == 4, again
    for stage, job in submitted:
        for task in (0, 1):
            ended = slurm.wait(f"{job}_{task}", states=["COMPLETED", "FAILED", "CANCELLED"])
            log = tmp_path / f"runs/small/slurm/{job}/{job}_{task}_0_log.out"
            assert ended["JobState"] == "COMPLETED", (stage, log.read_text())
    output = study()
    assert "submitted" not in output and "1 of 1" in output
    assert (tmp_path / "runs/small/models.svg").exists()
