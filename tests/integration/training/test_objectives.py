"""Every objective trains, is stopped, resumes exactly, moves to other ranks, and can be fine-tuned.

A new objective is one row of OBJECTIVES; one more row is a model of timm. All ranks start warm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.run import OBJECTIVES as REGISTERED
from tests.support.corpora.image_corpus import encoded
from tests.support.corpora.preparing import prepare_here, run_of
from tests.support.ranks.fault_runs import fault, wait_all
from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.ranks.warm_ranks import WarmStarter
from vitscale.config.errors import EXIT_BAD_INPUT

pytestmark = [pytest.mark.distributed]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective as a small run."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in configs/digits/pretrain.yaml, by section."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What it changes in the model, for fine-tuning too."""
    left_out: str = ""
    """A tensor that fine-tuning says it leaves out; empty: none."""
    has_teacher: bool = False
    """Its teacher is the run of `supervised`."""


OBJECTIVES = {
    "distillation": Case(
        config={"objective": {"name": "distillation"}},
        model={"distillation_token": True},
        has_teacher=True,
    ),
    "mae": Case(
        config={
            "objective": {
                "name": "mae",
                "decoder_width": 16,
                "decoder_depth": 1,
                "decoder_heads": 2,
            },
            "evaluate": [{"name": "knn", "max_bank_images": 100}],
        },
        model={"positions": "sincos2d_mae"},
        left_out="objective.blocks.0.attn.proj.bias",
    ),
    "masked_patch_prediction": Case(
        config={
            "objective": {"name": "masked_patch_prediction"},
            "evaluate": [{"name": "knn", "max_bank_images": 100}],
        },
        left_out="objective.mask_token",
    ),
    "supervised": Case(),
    "timm": Case(
        config={"optim": {"layer_decay": 0.9}},
        model={"name": "timm", "model": "test_convnext", "image_size": 32},
    ),
}
# Stopped between two checkpoints; two micro-batches on each of two ranks. All
# ranks learn of a signal at the end of the next step.
STEPS, SIGNALLED, STOPPED, ACCUMULATION = 6, 2, 3, 2
SMALL = {
    "data": {"global_batch": 16, "num_workers": 0},
    "model": {"width": 24, "depth": 2, "mlp_width": 48, "drop_path": 0.0},
    "engine": {"device": "cpu", "num_threads": 1, "timeout_min": 1, "max_micro_batch": 4},
    "tracking": {"uri": None, "log_every_steps": 1},
}
PRETRAIN: dict[str, Any] = {
    **SMALL,
    "optim": {"ema": {"decay": 0.9}},
    "schedule": {"epochs": None, "steps": STEPS, "warmup_steps": 2},
    "checkpoint": {"every_steps": 4},
    "evaluate": [{"name": "classification"}],
}
FINETUNE: dict[str, Any] = {
    **SMALL,
    "schedule": {"steps": 3, "warmup_steps": 1},
    "evaluate": [{"name": "classification"}],
}
STAGES = {0: {}, 1: {"activation_checkpointing": True}, 3: {}}


def merged(base: Mapping[str, Any], *more: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(base)
    for changes in more:
        for name, value in changes.items():
            both = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
            # A section with a name is another one.
            values[name] = {**values[name], **value} if both and "name" not in value else value
    return values


class Runs:
    """Small runs; the uninterrupted ones are shared."""

    def __init__(self, starter: WarmStarter, *, shards: Path, folder: Path) -> None:
        self.starter, self.shards, self.folder = starter, shards, folder
        self._folders: dict[tuple[str, int, bool], Path] = {}

    def pretrain(
        self,
        name: str,
        folder: Path,
        *,
        stage: int,
        num_ranks: int = 2,
        stopped: bool = False,
        **changes: Any,
    ) -> Sequence[int]:
        """Exit codes. stopped: one rank gets a signal in step SIGNALLED."""
        case = OBJECTIVES[name]
        engine = {"zero_stage": stage, **STAGES[stage]}
        values = merged(PRETRAIN, case.config, {"model": case.model, "engine": engine})
        if case.has_teacher and "objective" not in changes:
            teacher = {"weights": str(self.finished("supervised", stage=1))}
            values = merged(values, {"objective": {"teacher": teacher}})
        values |= changes
        faults = [fault("backward", SIGNALLED * ACCUMULATION, "SIGTERM")] if stopped else []
        return self._run("pretrain", folder, values, num_ranks=num_ranks, faults=faults)

    def finetune(self, name: str, folder: Path, *, init: Path) -> Sequence[int]:
        values = merged(FINETUNE, {"model": OBJECTIVES[name].model, "init": str(init)})
        return self._run("finetune", folder, values, num_ranks=2)

    def _run(
        self,
        stage: str,
        folder: Path,
        values: Mapping[str, Any],
        *,
        num_ranks: int,
        faults: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[int]:
        folder.mkdir(parents=True, exist_ok=True)
        base = "digits/pretrain" if stage == "pretrain" else "digits/finetune"
        places = {"output": str(folder / "run"), "data": {"path": str(self.shards)}}
        values = merged({"base": str(ROOT / f"configs/{base}.yaml")}, values, places)
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(values))
        command = [ROOT / "tests/support/ranks/patched_rank.py", ROOT / f"{stage}/main.py"]
        last = {"VITSCALE_FAULTS": json.dumps(list(faults))}
        ranks = self.starter.start(
            [*command, "--config", folder / f"{stage}.yaml"],
            num_ranks=num_ranks,
            folder=folder,
            environment={"VITSCALE_FAULTS": "[]", "VITSCALE_MUTANT": ""},
            own_environment=[{}] * (num_ranks - 1) + [last],
        )
        codes = wait_all(ranks)
        assert set(codes) <= {0, EXIT_BAD_INPUT, 75}, ranks[0].output()
        return codes

    def folder_of(self, name: str, *, stage: int, stopped: bool) -> Path:
        """The folder of a run on two ranks, which tests must not change."""
        key = (name, stage, stopped)
        if key not in self._folders:
            folder = self.folder / f"{name} {stage} {stopped}"
            codes = self.pretrain(name, folder, stage=stage, stopped=stopped)
            assert codes == ([75, 75] if stopped else [0, 0])
            self._folders[key] = folder / "run"
        return self._folders[key]

    def finished(self, name: str, *, stage: int) -> Path:
        return self.folder_of(name, stage=stage, stopped=False)

    def copy_stopped(self, name: str, folder: Path, *, stage: int) -> None:
        source = self.folder_of(name, stage=stage, stopped=True)
        assert read_state(source).step == STOPPED
        shutil.copytree(source, folder / "run")


@pytest.fixture(scope="module")
def runs(
    warm_starter: WarmStarter, digits_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    folder = tmp_path_factory.mktemp("objectives")
    return Runs(warm_starter, shards=digits_shards, folder=folder)


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in journal_rows(folder) if "train/loss" in row]


def test_every_objective_has_a_row() -> None:
    assert set(OBJECTIVES) == {*REGISTERED, "timm"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_stopped_and_resumed_equals_uninterrupted(
    runs: Runs, tmp_path: Path, name: str, stage: int
) -> None:
    runs.copy_stopped(name, tmp_path, stage=stage)
    assert runs.pretrain(name, tmp_path, stage=stage) == [0, 0]
    finished = runs.finished(name, stage=stage)
    assert differences(read_state(tmp_path / "run"), read_state(finished)) == []
    # The stages compute the same, but for the order of sums.
    assert losses(finished) == pytest.approx(losses(runs.finished(name, stage=0)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_rank_resumes_what_two_began(runs: Runs, tmp_path: Path, name: str) -> None:
    runs.copy_stopped(name, tmp_path, stage=1)
    assert runs.pretrain(name, tmp_path, stage=0, num_ranks=1) == [0]
    finished = runs.finished(name, stage=1)
    rows = [journal_rows(folder) for folder in (tmp_path / "run", finished)]
    assert rows[0][-1].keys() == rows[1][-1].keys()
    for ours, theirs in zip(*rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_finetuning_starts_from_its_trunk(runs: Runs, tmp_path: Path, name: str) -> None:
    source = runs.finished(name, stage=1)
    assert runs.finetune(name, tmp_path, init=source) == [0, 0]
    printed = (tmp_path / "rank-0.log").read_text()
    assert f"starting from {source}/checkpoints/step-0000000{STEPS}, step {STEPS}\n" in printed
    left_out = OBJECTIVES[name].left_out
    assert (left_out in printed) if left_out else ("left out" not in printed)
    (found,) = (row for row in journal_rows(tmp_path / "run") if "val/top1" in row)
    assert found["step"] == 3


@pytest.fixture(scope="module")
def unlabelled(warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on a flat folder of images."""
    folder = tmp_path_factory.mktemp("unlabelled")
    (folder / "images").mkdir()
    for number in range(40):
        (folder / f"images/{number}.png").write_bytes(encoded("PNG", seed=number, side=8))
    source, labels = {"holdout_fraction": 0.1}, {"values": "none"}
    prepare_here(run_of(folder / "images", folder / "shards", source=source, labels=labels))
    return Runs(warm_starter, shards=folder / "shards", folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, each in REGISTERED.items() if not each.needs_labels]
)
def test_shards_without_labels_train(unlabelled: Runs, tmp_path: Path, name: str) -> None:
    assert unlabelled.pretrain(name, tmp_path, stage=0, num_ranks=1, evaluate=[]) == [0]
    assert len(losses(tmp_path / "run")) == STEPS
    assert "36 images, no classes; global batch" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"),
    [("supervised", "supervised"), ("distillation", "distillation"), ("mae", "knn")],
)
def test_shards_without_labels_are_refused(
    unlabelled: Runs, tmp_path: Path, name: str, needs: str
) -> None:
    teacher = {"objective": {"name": name, "teacher": {"weights": str(tmp_path)}}}
    changes = teacher if name == "distillation" else {}
    codes = unlabelled.pretrain(name, tmp_path, stage=0, num_ranks=1, **changes)
    printed = (tmp_path / "rank-0.log").read_text()
    assert codes == [EXIT_BAD_INPUT]
    assert f"{needs} needs labels, but the shards of {unlabelled.shards} have none" in printed
    assert "Traceback" not in printed and not (tmp_path / "run/checkpoints").exists()
