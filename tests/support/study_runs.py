"""A small study and a small chain, and folders as their runs would leave them, without running."""

from __future__ import annotations

from pathlib import Path

from launch.plans.chains.graph import load_chain
from launch.plans.chains.settings import ChainRun
from launch.plans.stages import Plan, load_study
from launch.studies.grid import Grid, StudyTraining, expand
from launch.studies.settings import StudyRun
from tests.support.light_checkpoints import light_save
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.tracking.journal import Journal

PRETRAIN = """\
stage: pretrain
name: base
data: {path: shards, global_batch: 10, planned_num_samples: 1000}
model: {image_size: 8, patch_size: 4, width: 16, depth: 1, num_heads: 2, mlp_width: 32,
  num_classes: 5}
optim: {lr: 0.001}
schedule: {steps: 20}
"""
FINETUNE = PRETRAIN.replace("stage: pretrain", "stage: finetune").replace("20", "12")
STUDY = """\
stage: study
name: small
pretrain: {file: pretrain.yaml}
finetune: {file: finetune.yaml}
axes:
  - name: model
    values:
      - {label: narrow}
      - {label: wide, overrides: [model.width=32]}
      - {label: scratch, from_scratch: true}
  - name: images
    values:
      - {label: 1 %, pretrain: {overrides: [data.first_percent=1]}}
      - {label: 100 %}
seeds: [0, 1]
"""


def write_study(folder: Path, text: str = STUDY) -> Path:
    """The study's file beside its run files. Run files are found from the current folder."""
    (folder / "pretrain.yaml").write_text(PRETRAIN)
    (folder / "finetune.yaml").write_text(FINETUNE)
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def study_of(path: Path, *overrides: str) -> StudyRun:
    return load_run(StudyRun, path, overrides=overrides).run


def grid_of(path: Path, *overrides: str) -> Grid:
    return expand(study_of(path, *overrides), cluster="local")


def plan_of(path: Path, *overrides: str) -> Plan:
    return load_study(study_of(path, *overrides), "local")


def write_training(training: StudyTraining, *, step: int, value: float | None = None) -> None:
    """A run folder with a checkpoint of `step`, and the metric in its journal."""
    training.folder.mkdir(parents=True, exist_ok=True)
    (training.folder / "config.yaml").write_text(run_to_yaml(training.run))
    light_save(training.folder / "checkpoints", step=step)
    if value is not None:
        journal = Journal(training.folder / "journal.jsonl", resume_step=0)
        journal.append({"val/top1": 0.01, "val/loss": 3.0}, step=step - 1)
        journal.append({"val/top1": value}, step=step)
        journal.close()


def write_all(grid: Grid, values: dict[str, float]) -> None:
    """Every training done; the metric of each by its name."""
    for name, training in grid.trainings.items():
        assert training.steps is not None
        write_training(training, step=training.steps, value=values.get(name, 0.5))


DATA = """\
stage: data_prep
output: shards
source: {path: images}
"""
EVALUATE = """\
stage: evaluate
name: evaluation
init: none
data: {path: none}
evaluate: [{name: classification}]
"""
CHAIN = """\
stage: chain
name: small
stages:
  - {name: pretrain, config: pretrain.yaml, inputs: {data.path: shards}}
  - {name: shards, config: data.yaml, overrides: [launch.num_tasks=2]}
  - name: finetune
    config: finetune.yaml
    inputs: {data.path: shards, init: pretrain}
    sweep: {optim.lr: [0.01, 0.001], seed: [3, 4]}
  - {name: evaluate, config: evaluate.yaml, inputs: {data.path: shards, init: finetune}}
"""


def write_chain(folder: Path, text: str = CHAIN) -> Path:
    """The chain's file beside its run files. Run files are found from the current folder."""
    files = {"data": DATA, "pretrain": PRETRAIN, "finetune": FINETUNE, "evaluate": EVALUATE}
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(content)
    path = folder / "chain.yaml"
    path.write_text(text)
    return path


def chain_of(path: Path, *overrides: str, cluster: str = "local") -> Plan:
    return load_chain(load_run(ChainRun, path, overrides=overrides).run, cluster)
