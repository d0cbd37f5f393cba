"""The runs of a study."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.studies.grid import expand
from tests.contract.tree import ROOT
from tests.support.study_runs import STUDY, grid_of, study_of, write_study
from vitscale.config.errors import UserErrors


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


def errors_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserErrors) as caught:
        grid_of(path, *overrides)
    return caught.value.text()


def test_equal_runs_are_trained_once(study: Path) -> None:
    """From scratch, the pre-training's images make no difference."""
    assert list(grid_of(study, "seeds=[0]").trainings) == [
        "pretrain_narrow_1_seed0",
        "finetune_narrow_1_seed0",
        "pretrain_narrow_100_seed0",
        "finetune_narrow_100_seed0",
        "pretrain_wide_1_seed0",
        "finetune_wide_1_seed0",
        "pretrain_wide_100_seed0",
        "finetune_wide_100_seed0",
        "finetune_scratch_seed0",
    ]
    assert len(grid_of(study).trainings) == 2 * 9


def test_transfers_share_a_pretraining(tmp_path: Path) -> None:
    axis = """\
  - name: transfer
    values:
      - {label: pets, finetune: {overrides: [data.path=pets]}}
      - {label: flowers, finetune: {overrides: [data.path=flowers, model.num_classes=7]}}
seeds:"""
    grid = grid_of(write_study(tmp_path, STUDY.replace("seeds:", axis)), "seeds=[0]")
    stages = [name.split("_")[0] for name in grid.trainings]
    assert stages.count("pretrain") == 4 and stages.count("finetune") == 10
    flowers = grid.trainings["finetune_wide_1_flowers_seed0"]
    assert flowers.needs == "pretrain_wide_1_seed0"
    assert flowers.run.data.path == "flowers" and flowers.run.model.num_classes == 7


def test_runs_get_the_overrides_of_their_cell(study: Path) -> None:
    grid = grid_of(study, "overrides=[optim.lr=0.002]")
    pretrain, finetune = (grid.trainings[f"{s}_wide_1_seed1"] for s in ("pretrain", "finetune"))
    for training in (pretrain, finetune):
        run = training.run
        assert (run.model.width, run.seed, run.optim.lr) == (32, 1, 0.002)
        assert run.folder == f"runs/small/{training.name}"
        assert run.tracking.experiment == "small"
        assert run.tracking.tags == {
            "study": "small", "study.model": "wide", "study.images": "1 %",
        }  # fmt: skip
    assert (pretrain.run.data.first_percent, finetune.run.data.first_percent) == (1, 100)


def test_transfers_start_from_the_last_checkpoint(study: Path) -> None:
    """Of an unfinished pre-training there is none, so that its weights are never used."""
    run = grid_of(study).trainings["finetune_narrow_1_seed0"].run
    assert run.init == "runs/small/pretrain_narrow_1_seed0/checkpoints/step-00000020"
    assert grid_of(study).trainings["finetune_scratch_seed0"].run.init is None


def test_costs_are_those_of_the_subset(study: Path) -> None:
    trainings = grid_of(study).trainings
    small, whole = (trainings[f"pretrain_narrow_{share}_seed0"] for share in ("1", "100"))
    assert (small.images, whole.images) == (10, 1000)
    assert small.steps == whole.steps == 20
    assert small.flops == whole.flops and small.parameters == whole.parameters
    assert small.flops is not None and small.flops % (20 * 10) == 0


def test_every_invalid_cell_is_named(study: Path) -> None:
    text = errors_of(study, "overrides=[optim.lrr=1, data.global_batch=none]")
    assert "override optim.lrr: unknown key optim.lrr" in text and "did you mean optim.lr?" in text
    assert "data.global_batch: 'none'" in text
    assert "in: pretrain_narrow_1_seed0, pretrain_narrow_100_seed0" in text and "more" in text
    assert text.count("unknown key") == 1


def test_an_invalid_value_names_its_runs_alone(tmp_path: Path) -> None:
    text = STUDY.replace("model.width=32", "model.width=31")
    error = errors_of(write_study(tmp_path, text), "seeds=[0]")
    assert "in: pretrain_wide_1_seed0, pretrain_wide_100_seed0\n" in error + "\n"
    assert "narrow" not in error


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("[model.width=32]", "[name=x]", "the study sets name itself"),
        ("[data.first_percent=1]", "[init=x]", "the study sets init itself"),
        ("label: wide", "label: NARROW", "two labels have the same name 'narrow'"),
        ("name: images", "name: model", "axis 'model' is listed twice"),
        ("name: images", "name: seed", "cannot be the name of an axis"),
        ("seeds: [0, 1]", "seeds: [1, 1]", "a seed is listed twice"),
        ("finetune: {file: finetune.yaml}\n", "", "changes the transfer"),
        ("label: scratch", "label: '%'", "every label needs a letter or a digit"),
    ],
)
def test_conflicts_in_the_study_are_refused(
    tmp_path: Path, before: str, after: str, expected: str
) -> None:
    assert before in STUDY
    path = write_study(tmp_path, STUDY.replace(before, after))
    with pytest.raises(UserErrors) as caught:
        study_of(path)
    assert expected in caught.value.text()


def test_a_missing_run_file_is_named(study: Path) -> None:
    assert "no run file for pretrain" in errors_of(study, "pretrain.file=null")
    assert "there is no file" in errors_of(study, "pretrain.file=nowhere.yaml")


def test_a_value_may_name_another_run_file(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base: pretrain.yaml\noptim: {lr: 0.5}\n")
    text = STUDY.replace("label: narrow}", "label: narrow, pretrain: {file: other.yaml}}")
    trainings = grid_of(write_study(tmp_path, text)).trainings
    assert trainings["pretrain_narrow_1_seed0"].run.optim.lr == 0.5
    assert trainings["pretrain_wide_1_seed0"].run.optim.lr == 0.001


def test_a_study_may_have_no_transfer(tmp_path: Path) -> None:
    text = STUDY.replace("finetune: {file: finetune.yaml}\n", "")
    text = text.replace("      - {label: scratch, from_scratch: true}\n", "")
    grid = grid_of(write_study(tmp_path, text))
    assert {training.kind for training in grid.trainings.values()} == {"pretrain"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/studies").glob("*.yaml")), ids=lambda path: path.stem
)
def test_studies_of_the_repository_expand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    study = study_of(path)
    grid = expand(study, cluster="slurm")
    assert len(grid.trainings) > 4


def test_the_init_of_an_axis_is_taken_before_that_of_the_study(tmp_path: Path) -> None:
    text = STUDY.replace("pretrain: {file: pretrain.yaml}\n", "init: runs/of_study\n")
    text = text.replace("      - {label: 1 %, pretrain: {overrides: [data.first_percent=1]}}\n", "")
    text = text.replace("label: wide,", "label: wide, init: runs/of_value,")
    grid = grid_of(write_study(tmp_path, text), "seeds=[0]")
    inits = {training.labels["model"]: training.run.init for training in grid.trainings.values()}
    assert inits == {"narrow": "runs/of_study", "wide": "runs/of_value", "scratch": None}
