"""A run of ours teaches another; the student is fine-tuned with its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import journal_rows
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.training.teacher import Teacher, open_teacher

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SMALL: dict[str, Any] = {
    "data": {"global_batch": 16, "num_workers": 0, "mean": [0.4, 0.4, 0.4]},
    "model": {"width": 24, "depth": 1, "num_heads": 2, "mlp_width": 48, "drop_path": 0.0},
    "engine": {"device": "cpu", "num_threads": 1, "timeout_min": 1, "zero_stage": 3},
    "optim": {"ema": {"decay": 0.5}},
    "schedule": {"epochs": None, "steps": 4, "warmup_steps": 1},
    "checkpoint": {"every_steps": 2},
    "tracking": {"uri": None, "log_every_steps": 2},
    "evaluate": [{"name": "classification"}],
}
TOKEN = {"distillation_token": True}


def run(fault_runs: FaultRuns, folder: Path, stage: str, **changes: Any) -> str:
    """Train on one rank in `folder`/run; returns what was printed. changes: whole sections."""
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {**SMALL, "output": str(folder / "run")}
    if stage == "finetune":
        values["optim"], values["schedule"] = {}, {"steps": 3, "warmup_steps": 1}
    for name, value in changes.items():
        both = isinstance(value, dict) and name in values
        values[name] = {**values[name], **value} if both else value
    values["data"] = {**values["data"], "path": str(fault_runs.shards)}
    base = "digits/pretrain" if stage == "pretrain" else "digits/finetune"
    values["base"] = str(ROOT / f"configs/{base}.yaml")
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    command: list[str | Path] = [ROOT / f"{stage}/main.py", "--config", folder / "run.yaml"]
    ranks = fault_runs.starter.start(command, num_ranks=1, folder=folder)
    assert wait_all(ranks) == [0], ranks[0].output()
    return ranks[0].output()


def teaching(weights: Path, **settings: Any) -> dict[str, Any]:
    return {"name": "distillation", "teacher": {"weights": str(weights)}, **settings}


def opened(weights: Path, num_classes: int = 10) -> Teacher:
    return open_teacher(
        str(weights),
        model=None,
        image_size=None,
        num_classes=num_classes,
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def teacher(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    run(fault_runs, folder, "pretrain", model={"gelu": "erf", "num_registers": 1})
    return folder / "run"


@pytest.fixture(scope="module")
def student(fault_runs: FaultRuns, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    run(
        fault_runs, folder, "pretrain", model=TOKEN, objective=teaching(teacher),
        evaluate=[{"name": "classification"}],
    )  # fmt: skip
    return folder / "run"


def test_the_teacher_is_the_runs_averaged_model(teacher: Path) -> None:
    found = opened(teacher)
    checkpoint, _ = newest_checkpoint(teacher / "checkpoints")
    assert checkpoint is not None
    weights = checkpoint.tensors(prefix="ema.")
    state = found.model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in state)
    # White: (1 - 0.4) / 0.5 in every channel, and the run's GELU.
    seen = []
    found.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found.logits(torch.full((1, 3, 16, 16), 255.0), dtype=torch.float32)
    assert torch.allclose(seen[0], torch.tensor(1.2))
    model: Any = found.model
    assert model.blocks[0].mlp.act.approximate == "none"
    assert opened(checkpoint.folder).fingerprint == found.fingerprint


def test_metrics_name_both_heads_and_both_losses(student: Path) -> None:
    rows = journal_rows(student)
    logged = {key for row in rows for key in row}
    assert {f"val/{name}_top1" for name in ("cls", "dist", "softmax", "ema_cls")} <= logged
    parts = [row for row in rows if "train/loss" in row]
    for row in parts:
        mean = (row["train/label_loss"] + row["train/teacher_loss"]) / 2
        assert row["train/loss"] == pytest.approx(mean, rel=1e-5)
        assert 0 <= row["train/teacher_agreement"] <= 1
    state = newest_checkpoint(student / "checkpoints")[0]
    assert state is not None
    assert not [name for name in state.tensors() if "teacher" in name]


def test_the_student_is_finetuned_at_a_higher_resolution(
    fault_runs: FaultRuns, teacher: Path, student: Path, tmp_path: Path
) -> None:
    """The teacher keeps its own 16 px; both heads are kept."""
    printed = run(
        fault_runs, tmp_path, "finetune", model={**TOKEN, "image_size": 24}, init=str(student),
        keep_head=True, evaluate=[{"name": "classification"}],
        objective=teaching(teacher, kind="soft", alpha=0.1, tau=3.0),
    )  # fmt: skip
    assert f"starting from {student}/checkpoints/step-00000004, step 4\n" in printed
    (row,) = (row for row in journal_rows(tmp_path / "run") if "val/dist_top1" in row)
    assert row["step"] == 3
