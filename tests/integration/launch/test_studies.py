"""A study through launch/local.py with real trainings: stopped, resumed, with failing cells."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.corpora.small_shards import make_shard_folder
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).resolve().parents[3]
RUN = """\
stage: {stage}
name: tiny
data: {{path: shards, global_batch: 2, num_workers: 0}}
model: {{image_size: 8, patch_size: 4, width: 8, depth: 1, num_heads: 1, mlp_width: 8}}
optim: {{lr: 0.001}}
schedule: {{steps: 4}}
engine: {{device: cpu, zero_stage: 0}}
checkpoint: {{every_steps: 2}}
tracking: {{uri: null, log_every_steps: 2}}
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
  - name: transfer
    values:
      - {label: same}
      # Found to be missing when the training starts.
      - {label: lost, finetune: {overrides: [data.path=lost, data.planned_num_samples=9]}}
figures:
  - {name: models, x: model, series: transfer}
"""


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "launch/local.py", "--study", "study.yaml", "--parallel", "2"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_stopped_study_resumes_and_reports_failures(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards")
    for stage in ("pretrain", "finetune"):
        (tmp_path / f"{stage}.yaml").write_text(RUN.format(stage=stage))
    (tmp_path / "study.yaml").write_text(STUDY)

    study = start(tmp_path)
    assert study.stdout is not None
    lines = iter(study.stdout.readline, "")
    before = next(line for line in lines if line.startswith("done    pretrain_"))
    study.send_signal(signal.SIGTERM)
    rest, _ = study.communicate(timeout=PATIENCE_S)
    assert study.returncode == 75, rest
    assert "the same command resumes the study" in rest
    first = before.split()[1]
    checkpoint = tmp_path / f"runs/small/{first}/checkpoints/step-00000004/manifest.json"
    written = checkpoint.stat().st_mtime_ns

    study = start(tmp_path)
    output, _ = study.communicate(timeout=PATIENCE_S)
    assert study.returncode == 1, output
    assert f"started {first}" not in output and checkpoint.stat().st_mtime_ns == written
    assert "2 training(s) failed" in output and "lost" in output
    assert "alone: python launch/local.py --config runs/small/finetune_narrow_lost_seed0" in output
    rows = list(csv.DictReader((tmp_path / "runs/small/results.csv").open()))
    assert [bool(row["mean"]) for row in rows] == [True, False, True, False]
    assert (tmp_path / "runs/small/models.png").exists()
