"""A study through launch/local.py with real trainings: stopped, resumed, with failing cells."""

from __future__ import annotations

import csv
import os
import signal
import sqlite3
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


def start(folder: Path, *, parallel: int = 2) -> subprocess.Popen[str]:
    launcher = [sys.executable, ROOT / "launch/local.py"]
    return subprocess.Popen(
        [*launcher, "--study", "study.yaml", "--parallel", str(parallel)],
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
    assert "2 part(s) of the study are not done" in output and "lost" in output
    assert "alone: python launch/local.py --config runs/small/finetune_narrow_lost_seed0" in output
    rows = list(csv.DictReader((tmp_path / "runs/small/results.csv").open()))
    assert [bool(row["mean"]) for row in rows] == [True, False, True, False]
    assert (tmp_path / "runs/small/models.png").exists()


SELECTING = """\
stage: study
name: chosen
finetune: {file: finetune.yaml, overrides: [data.dev_percent=10]}
axes:
  - name: set
    values: [{label: digits, from_scratch: true}]
  - name: rate
    values:
      - {label: "0", finetune: {overrides: [optim.lr=1e-12]}}
      - {label: "0.002", finetune: {overrides: [optim.lr=0.002]}}
seeds: [3, 4]
# By the loss: after 40 steps the accuracy on 144 images is chance.
select: {axis: rate, metric: val/loss}
other_metrics: [val/loss]
table: {rows: set}
figures: [{name: rates, x: rate, series: set}]
"""


def test_a_stopped_study_chooses_trains_and_tests(digits_shards: Path, tmp_path: Path) -> None:
    """One of the two rates changes nothing; the final runs train on all images."""
    run = RUN.format(stage="finetune").replace("path: shards", f"path: {digits_shards}")
    run = run.replace("global_batch: 2", "global_batch: 32").replace("width: 8", "width: 16")
    run = run.replace("steps: 4", "steps: 40").replace("optim: {", "optim: {layer_decay: 0.9, ")
    database = tmp_path / "mlflow.db"
    run = run.replace("uri: null", f"uri: 'sqlite:///{database}'")
    (tmp_path / "finetune.yaml").write_text(run)
    (tmp_path / "study.yaml").write_text(SELECTING)

    # One at a time: the second trial is not done when the study stops.
    study = start(tmp_path, parallel=1)
    assert study.stdout is not None
    lines = iter(study.stdout.readline, "")
    before = next(line for line in lines if line.startswith("done    trial_"))
    study.send_signal(signal.SIGTERM)
    rest, _ = study.communicate(timeout=PATIENCE_S)
    assert study.returncode == 75, rest

    study = start(tmp_path)
    output, _ = study.communicate(timeout=PATIENCE_S)
    assert study.returncode == 0, output
    assert f"started {before.split()[1]}" not in output
    assert output.count("chosen  rate 0.002 for final_digits_seed") == 2, output
    folder = tmp_path / "runs/chosen"
    for seed in (3, 4):
        log = next((folder / f"final_digits_seed{seed}/local").glob("*/*_0_log.out")).read_text()
        assert ", 1437 images, " in log and "on 360 images of 'test'" in log
    log = next((folder / "trial_digits_0_seed0/local").glob("*/*_0_log.out")).read_text()
    assert ", 1293 images, " in log and "on 144 images of the last 10 % of 'train'" in log
    page = (folder / "table.md").read_text()
    assert "| digits | 0.002 | " in page and "## val/loss" in page
    assert (folder / "rates.png").exists()
    assert [row["selected"] for row in csv.DictReader((folder / "selected.csv").open())] == [
        "false",
        "true",
    ]
    check_mlflow(database, page)


def check_mlflow(database: Path, page: str) -> None:
    """One finished parent with the table, its trainings as children, the best trial tagged."""
    with sqlite3.connect(database) as connection:
        runs = dict(connection.execute("select name, run_uuid from runs").fetchall())
        tags = {
            (run, key): value
            for run, key, value in connection.execute("select run_uuid, key, value from tags")
        }
        status = connection.execute("select status from runs").fetchall()
    parent = runs.pop("chosen")
    assert len(runs) == 4 and set(status) == {("FINISHED",)}
    assert {tags[run, "mlflow.parentRunId"] for run in runs.values()} == {parent}
    assert tags[parent, "mlflow.note.content"] == page
    assert {name: tags.get((run, "study.selected")) for name, run in runs.items()} == {
        "trial_digits_0_seed0": "false",
        "trial_digits_0.002_seed0": "true",
        "final_digits_seed3": None,
        "final_digits_seed4": None,
    }
