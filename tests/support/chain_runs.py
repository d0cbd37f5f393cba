"""A small chain, and folders as its runs would leave them, without running."""

from __future__ import annotations

from pathlib import Path

from launch.chains.load import Chain, ChainStep, load_chain
from launch.chains.settings import ChainRun
from tests.support.light_checkpoints import light_save
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.distributed.events import record_start

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


def chain_of(path: Path, *overrides: str, cluster: str = "local") -> Chain:
    return load_chain(load_run(ChainRun, path, overrides=overrides).run, cluster=cluster)


def steps_of(chain: Chain, stage: str) -> list[ChainStep]:
    return [step for step in chain.steps if step.stage == stage]


def write_training(step: ChainStep, *, at: int, total: int = 20) -> None:
    """A run folder with a checkpoint."""
    step.folder.mkdir(parents=True, exist_ok=True)
    (step.folder / "config.yaml").write_text(run_to_yaml(step.run))
    record_start(step.folder, first_step=0, total_steps=total)
    light_save(step.folder / "checkpoints", step=at)
