"""Reports of wrong configurations, word for word: tests/golden/config_errors.txt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.golden import Golden
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run
from vitscale.config.section import Run
from vitscale.runs.data_prep import DataPrepRun

REPOSITORY = Path(__file__).parents[3]
STAGES: dict[str, type[Run]] = {
    "data_prep": DataPrepRun,
    "pretrain": PretrainRun,
    "finetune": FinetuneRun,
}
VALID = """\
stage: pretrain
name: demo
data:
  path: shards
  global_batch: 64
model: {preset: B/16}
optim: {lr: 1e-3}
schedule:
  epochs: 3
"""
FILES = {
    "a.yaml": VALID,
    "many.yaml": "base: a.yaml\noptim:\n  lr: fast\nmodel:\n  num_classes: x\n"
    "seeed: 1\ndata: {path: null}\nschedule: {final_lr: .inf}\n",
    "twice.yaml": "base: a.yaml\noptim:\n  lr: fast\n  lr: 3\n",
    "missing.yaml": "stage: pretrain\ndata:\n  global_batch: 64\nmodel: {preset: B/16}\n"
    "optim: {lr: 1e-3}\nschedule: {epochs: 1}\n",
    "dotted.yaml": VALID + "checkpoint.keep: 1\n",
    "conflict.yaml": VALID + "  steps: 10\n",
    "stage.yaml": VALID.replace("pretrain", "pretraining"),
    "no_stage.yaml": VALID.replace("stage: pretrain\n", "") + "unknown: 1\n",
    "tune.yaml": VALID.replace("pretrain", "finetune"),
    "broken.yaml": "stage: pretrain\ndata: {path: [1\nname: x\n",
    "lost.yaml": "base: nowhere.yaml\nname: x\n",
    "circle.yaml": "base: circle.yaml\nname: x\n",
    "choice/child.yaml": "base: parent.yaml\nobjective: {name: mae, label_smoothing: 0.2}\n",
    "choice/parent.yaml": VALID + "objective:\n  label_smoothing: 0.1\n  smoothing: 0.1\n",
    "data.yaml": "stage: data_prep\noutput: out\nsource:\n  path: images\n",
}
# A file, and the overrides of one command.
COMMANDS: list[tuple[str, ...]] = [
    ("a.yaml", "optim.lr=fast"),
    ("a.yaml", "optim.lr=-1", "engine.zero_stage=4", "seed=-1"),
    ("a.yaml", "data.horizontal_flip=on", "data.val_split=1"),
    ("a.yaml", "data.global_batch=1e3", "checkpoint.keep='2'", "checkpoint.every_steps=1_000"),
    ("a.yaml", "name=16", "data.path=true"),
    ("a.yaml", "optim.betas=[0.9]", "data.mean=[0.5, 0.5, x]"),
    ("a.yaml", "tracking=3", "launch.sbatch.x=[1]"),
    ("a.yaml", "tracking.log_every_step=3", "tracking._target_=os.system"),
    ("a.yaml", "lr", "=3", "a..b=3", "optim.lr=", "optim.betas=[1,", "base=a.yaml"),
    ("a.yaml", "schedule.final_lr=.nan", "schedule.warmup_steps=-1"),
    ("a.yaml", "model.image_size=225"),
    ("a.yaml", "model.num_classes=0", "objective.label_smoothing=1"),
    ("a.yaml", "schedule.steps=10"),
    ("a.yaml", "objective.name=mea"),
    ("a.yaml", "launch.tasks_per_node=2", "launch.gpus_per_node=4", "launch.num_tasks=3"),
    ("a.yaml", "launch.sbatch.nodes=3", "launch.sbatch.output=x", "launch.sbatch.N=1"),
    ("a.yaml", 'launch.partition="a b"', 'launch.setup=["a\\nb"]', "launch.srun_args=[x]"),
    ("a.yaml", "launch.timeout_min=5", "launch.signal_delay_s=300"),
    ("many.yaml", "oops", "engine.precision=fp8"),
    ("twice.yaml", "optim.lr=3", "optim={lr: 3, lr: 4}", "lr"),
    ("missing.yaml",),
    ("dotted.yaml",),
    ("conflict.yaml",),
    ("stage.yaml",),
    ("no_stage.yaml", "engine.zero_stage=7"),
    ("tune.yaml", "tracking.url=x", "init=[1]"),
    ("broken.yaml",),
    ("lost.yaml",),
    ("circle.yaml",),
    ("nothing.yaml",),
    ("data.yaml", "source.splits={train: a, tar: b}", "source.holdout_fraction=0.5"),
    ("data.yaml", "source.holdout_split=train", "source.val_per_class=5", "labels.values=index"),
    ("data.yaml", "labels.values=none", "labels.space=imagenet_1k", "launch.nodes=2"),
    ("a.yaml", "objective.mask_ratio=0.5", "objective.label_smooting=1"),
    ("a.yaml", "objective={name: mae, maskratio: 1, mask_ratio: 0}"),
    ("a.yaml", "objective.name=3"),
    ("a.yaml", "objective={name: distillation, teacher: {wieghts: x}}"),
    ("a.yaml", "objective=3", "schedule=3", "evaluate={name: knn}"),
    (
        "a.yaml",
        "evaluate=[{k: 1}, {name: knnn}, {name: knn, kk: 1, k: 0}, {name: few_shot, l2: x}]",
    ),
    ("a.yaml", "optim.betas=[0.9, x]", "data.horizontal_flip=1", "engine.zero_stage=true"),
    ("a.yaml", "data.global_batch='64'", "optim.warmup=3"),
    ("choice/child.yaml", "evaluate=[{name: knn, every_steps: x}]"),
    ("a.yaml", "data.globalbatch=1", "model.img_size=1", "schedul.epochs=1", "zero_stage=1"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "choice").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def report(path: str, *overrides: str) -> str:
    with pytest.raises(UserErrors) as caught:
        load_run(STAGES, path, overrides=overrides)
    return "\n".join(error.text() for error in caught.value.errors)


def test_every_report_reads_as_it_did(here: Path, golden: Golden) -> None:
    blocks = [f"$ {' '.join(command)}\n{report(*command)}\n" for command in COMMANDS]
    golden.text("config_errors.txt", "\n".join(blocks))


def test_a_script_prints_the_whole_report(here: Path) -> None:
    command = ("many.yaml", "oops", "engine.precision=fp8")
    done = script("pretrain/main.py", "--config", *command)
    assert done.returncode == 2
    assert report(*command) in done.stderr, done.stderr
    done = script("launch/local.py", "--config", "a.yaml", "--num-procs", "two")
    assert done.stderr == "error:\n--num-procs: 'two' is not allowed\n  allowed: 1, 2, ...\n"


def test_a_printed_configuration_is_the_run(here: Path) -> None:
    first = script("pretrain/main.py", "--config", "a.yaml", "optim.lr=2e-3", "--print-config")
    (here / "again.yaml").write_text(first.stdout)
    second = script("pretrain/main.py", "--config", "again.yaml", "--print-config")
    lines = [line.split("#")[0].rstrip() for line in first.stdout.splitlines()]
    assert [line.split("#")[0].rstrip() for line in second.stdout.splitlines()] == lines
    sources = {line.strip().partition(":")[0]: line for line in first.stdout.splitlines()}
    assert sources["lr"].split("# ")[1] == "command line"
    assert sources["global_batch"].split("# ")[1] == "a.yaml:5"
    assert sources["every_steps"].split("# ")[1] == "default"


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True)
