"""Which trainings of a study are done, resumable, missing, or made with other settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch.studies.grid import Grid
from launch.studies.states import Completion, changed_error, overview, states_of
from tests.support.study_runs import grid_of, write_all, write_study, write_training

PRETRAIN, FINETUNE = "pretrain_wide_1_seed0", "finetune_wide_1_seed0"


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


@pytest.fixture
def grid(study: Path) -> Grid:
    return grid_of(study)


def progress(grid: Grid, name: str) -> Completion:
    return states_of(grid)[name].progress


def test_states_follow_the_checkpoints(grid: Grid) -> None:
    assert {state.progress for state in states_of(grid).values()} == {Completion.MISSING}
    write_training(grid.trainings[PRETRAIN], step=7)
    assert states_of(grid)[PRETRAIN].text == "resumable (step 7)"
    write_training(grid.trainings[PRETRAIN], step=20)
    assert progress(grid, PRETRAIN) is Completion.DONE
    assert progress(grid, FINETUNE) is Completion.MISSING


def test_a_damaged_checkpoint_does_not_count(grid: Grid) -> None:
    write_training(grid.trainings[PRETRAIN], step=20)
    folder = grid.trainings[PRETRAIN].folder / "checkpoints/step-00000020"
    next(folder.glob("*.safetensors")).write_bytes(b"cut")
    assert progress(grid, PRETRAIN) is Completion.MISSING


def test_changed_settings_are_reported(grid: Grid, study: Path) -> None:
    write_all(grid, {})
    now = grid_of(study, "pretrain.overrides=[optim.weight_decay=0.5]")
    states = states_of(now)
    assert states[PRETRAIN].progress is Completion.CHANGED
    text = changed_error(now.trainings[PRETRAIN], states[PRETRAIN]).text()
    assert "runs/small/pretrain_wide_1_seed0: trained to step 20" in text
    assert "optim.weight_decay: trained with 0.0, now 0.5" in text
    assert "optim.weight_decay" in overview(now, states)


def test_settings_without_effect_may_change(grid: Grid, study: Path) -> None:
    write_all(grid, {})
    changes = (
        "launch.timeout_min=7, checkpoint.every_steps=9, tracking.uri=null, data.num_workers=0, "
        "engine.num_threads=1"
    )
    now = grid_of(study, f"overrides=[{changes}]")
    assert {state.progress for state in states_of(now).values()} == {Completion.DONE}


def test_a_transfer_without_its_pretraining_is_changed(grid: Grid) -> None:
    """A pre-training that is repeated may end with other weights than the transfer had."""
    write_all(grid, {})
    shutil.rmtree(grid.trainings[PRETRAIN].folder)
    assert progress(grid, PRETRAIN) is Completion.MISSING
    state = states_of(grid)[FINETUNE]
    assert state.progress is Completion.CHANGED
    assert state.changes == (f"its pre-training {PRETRAIN} is missing",)


def test_an_unreadable_configuration_counts_as_changed(grid: Grid) -> None:
    write_training(grid.trainings[PRETRAIN], step=20)
    (grid.trainings[PRETRAIN].folder / "config.yaml").write_text("stage: pretrain\nnew_key: 1\n")
    assert progress(grid, PRETRAIN) is Completion.CHANGED


def test_the_overview_counts_what_is_left(grid: Grid) -> None:
    write_training(grid.trainings[PRETRAIN], step=20)
    write_training(grid.trainings["pretrain_wide_100_seed0"], step=5)
    text = overview(grid, states_of(grid))
    assert "18 trainings (16 missing, 1 resumable, 1 done)" in text
    assert "to train: 17 trainings" in text
    line = next(line for line in text.splitlines() if f" {PRETRAIN} " in line)
    assert line.split()[1:4] == ["done", "10", "20"]
