"""Choosing the value of an axis on held-out images, and the final runs with it."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from launch.jobs.job import StageJob
from launch.jobs.monitor import StopFlag
from launch.plans.running import FailedRun, _StageRuns
from launch.plans.states import plan_states
from launch.plans.submitting import missing_steps
from launch.studies.grid import Grid
from launch.studies.results import collect, collect_trials
from launch.studies.selection import (
    SelectingJob,
    best,
    check_held_out,
    chosen,
    resolve,
    selected_table,
    selections,
    write_selected,
)
from launch.studies.states import Completion, states_of
from tests.contract.tree import ROOT
from tests.support.study_runs import grid_of, plan_of, study_of, write_study, write_training
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.distributed.failures.events import record_divergence

SELECTING = """\
stage: study
name: small
init: runs/before
finetune: {file: finetune.yaml}
axes:
  - name: set
    values:
      - {label: Pets, overrides: [data.dev_percent=10, model.num_classes=37]}
      - {label: ImageNet, overrides: [data.dev_percent=1, data.planned_num_samples=2000]}
  - name: rate
    values:
      - {label: low, overrides: [optim.lr=0.001]}
      - {label: high, overrides: [optim.lr=0.03]}
      - {label: highest, overrides: [optim.lr=0.06], only: {set: [ImageNet]}}
seeds: [5, 6]
select: {axis: rate}
"""


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path, SELECTING)


def write_trials(grid: Grid, values: dict[str, float]) -> None:
    for name, value in values.items():
        write_training(grid.trainings[name], step=12, value=value)


PETS = {"trial_pets_low_seed0": 0.4, "trial_pets_high_seed0": 0.6}


def test_trials_and_final_runs_are_separate(study: Path) -> None:
    grid = grid_of(study)
    assert list(grid.trainings) == [
        "trial_pets_low_seed0",
        "trial_pets_high_seed0",
        "trial_imagenet_low_seed0",
        "trial_imagenet_high_seed0",
        "trial_imagenet_highest_seed0",
        "final_pets_seed5",
        "final_imagenet_seed5",
        "final_pets_seed6",
        "final_imagenet_seed6",
    ]
    trial, final = grid.trainings["trial_pets_low_seed0"], grid.trainings["final_pets_seed5"]
    assert (trial.run.data.dev_percent, trial.images, trial.run.seed) == (10, 900, 0)
    assert (final.run.data.dev_percent, final.images, final.run.seed) == (0, 1000, 5)
    assert trial.run.tracking.tags["study.kind"] == "trial"
    assert {t.run.model_dump()["init"] for t in grid.trainings.values()} == {"runs/before"}
    assert [list(cell.values) for cell in grid.cells] == [["set"]] * 4


def test_the_best_value_becomes_the_final_run(study: Path) -> None:
    grid = grid_of(study)
    assert states_of(grid)["final_pets_seed5"].progress is Completion.WAITING
    write_trials(grid, PETS)
    grid, states = resolve(grid)
    for seed in (5, 6):
        final = grid.trainings[f"final_pets_seed{seed}"]
        assert (final.run.optim.lr, final.labels["rate"], final.candidates) == (0.03, "high", ())
        assert states[final.name].progress is Completion.MISSING
    assert states["final_imagenet_seed5"].progress is Completion.WAITING
    assert [each.label for each in selections(grid, states)] == ["high", None]


def test_several_seeds_of_trials_are_averaged(study: Path) -> None:
    grid = grid_of(study, "select.seeds=[0,1]")
    write_trials(grid, PETS | {"trial_pets_low_seed1": 0.9, "trial_pets_high_seed1": 0.6})
    grid, states = resolve(grid)
    pets = selections(grid, states)[0]
    assert pets.label == "low" and pets.means == {"low": pytest.approx(0.65), "high": 0.6}
    assert grid.trainings["final_pets_seed6"].run.optim.lr == 0.001


def test_one_value_can_be_chosen_for_all_sets(study: Path) -> None:
    """As the ViT paper's VTAB: `high` is best for Pets, `low` on average."""
    study.write_text(SELECTING.replace(", only: {set: [ImageNet]}", ""))
    grid = grid_of(study, "select.mean_over=[set]")
    rates = ("low", "high", "highest")
    write_trials(
        grid,
        {f"trial_pets_{rate}_seed0": v for rate, v in zip(rates, (0.4, 0.6, 0.5), strict=True)},
    )
    assert [each.label for each in selections(*resolve(grid))] == [None]
    write_trials(
        grid,
        {f"trial_imagenet_{rate}_seed0": v for rate, v in zip(rates, (0.8, 0.5, 0.5), strict=True)},
    )
    (selection,) = selections(*resolve(grid))
    assert selection.label == "low" and selection.others == {"set": "all"}
    finals = [t for t in resolve(grid)[0].trainings.values() if t.kind == "final"]
    assert [t.labels["rate"] for t in finals] == ["low"] * 4


def test_the_direction_comes_from_the_metric() -> None:
    means = {"a": 0.5, "b": float("nan"), "c": 0.7, "d": 0.7}
    assert best(means, metric="val/top1") == "c"
    assert best(means, metric="val/loss") == "a"
    assert best({"b": float("nan"), "a": 0.0}, metric="val/top1") == "a"


def diverge(grid: Grid, name: str) -> None:
    """As a training that skipped too many updates leaves its folder."""
    training = grid.trainings[name]
    training.folder.mkdir(parents=True)
    (training.folder / "config.yaml").write_text(run_to_yaml(training.run))
    record_divergence(training.folder, step=3, what="skipped")


def test_a_diverged_trial_is_the_worst_of_its_choice(study: Path) -> None:
    grid = grid_of(study)
    write_trials(grid, {"trial_pets_low_seed0": 0.0})
    diverge(grid, "trial_pets_high_seed0")
    grid, states = resolve(grid)
    assert states["trial_pets_high_seed0"].progress is Completion.DIVERGED
    assert grid.trainings["final_pets_seed5"].labels["rate"] == "low"
    pets, _ = found = selections(grid, states)
    assert pets.label == "low" and math.isnan(pets.means["high"] or 0.0)
    assert ("Pets", "low", "0.00 %", "diverged", "") in selected_table(grid, found).rows
    plan = plan_of(study)
    arrays = missing_steps(plan.stages[0], plan_states(plan))
    left = [step.name for array in arrays for step in array.steps]
    assert "trial_pets_high_seed0" not in left


def test_only_the_same_trial_counts_as_diverged(study: Path) -> None:
    grid = grid_of(study)
    diverge(grid, "trial_pets_high_seed0")
    for name in ("final_pets_seed5", "final_pets_seed6"):
        diverge(grid, name)
    changed = grid_of(study, "finetune.overrides=[optim.weight_decay=0.5]")
    assert states_of(changed)["trial_pets_high_seed0"].progress is Completion.CHANGED
    write_trials(grid, {"trial_pets_low_seed0": 0.5})
    assert resolve(grid)[1]["final_pets_seed5"].progress is Completion.MISSING


def test_a_choice_among_diverged_trials_is_an_error(study: Path) -> None:
    grid = grid_of(study)
    for name in PETS:
        diverge(grid, name)
    assert [each.label for each in selections(grid, states_of(grid))] == [None, None]
    with pytest.raises(UserError, match="the trials of all values have diverged: low, high"):
        chosen(grid, grid.trainings["final_pets_seed5"])


def test_a_final_run_of_another_choice_is_changed(study: Path) -> None:
    grid = grid_of(study)
    write_trials(grid, PETS)
    write_training(resolve(grid)[0].trainings["final_pets_seed5"], step=12, value=0.7)
    assert resolve(grid)[1]["final_pets_seed5"].progress is Completion.DONE
    (grid.trainings["trial_pets_high_seed0"].folder / "journal.jsonl").unlink()
    write_trials(grid, {"trial_pets_high_seed0": 0.1})
    state = resolve(grid)[1]["final_pets_seed5"]
    assert state.progress is Completion.CHANGED
    assert state.changes == ("optim.lr: trained with 0.03, now 0.001",)


def test_the_choices_are_written_with_all_values(study: Path) -> None:
    grid = grid_of(study)
    write_trials(grid, PETS)
    path = write_selected(grid, selections(*resolve(grid)), folder=Path("results"))
    rows = list(csv.DictReader(path.open()))
    assert [(row["set"], row["rate"], row["selected"], row["mean"]) for row in rows] == [
        ("Pets", "low", "false", "0.4"),
        ("Pets", "high", "true", "0.6"),
    ]


def test_results_are_those_of_the_final_runs(study: Path) -> None:
    grid = grid_of(study)
    write_trials(grid, PETS)
    grid, _ = resolve(grid)
    for seed, value in ((5, 0.7), (6, 0.8)):
        write_training(grid.trainings[f"final_pets_seed{seed}"], step=12, value=value)
    pets, imagenet = collect(grid, states_of(grid))
    assert pets.by_seed == {5: 0.7, 6: 0.8} and imagenet.mean is None
    assert [result.mean for result in collect_trials(grid, states_of(grid))][:3] == [0.4, 0.6, None]


def test_arrays_choose_when_they_start(study: Path) -> None:
    """The final array waits for the trials; its tasks read their journals."""
    plan = plan_of(study)
    arrays = missing_steps(plan.stages[0], plan_states(plan))
    assert [(a.name, len(a.steps)) for a in arrays] == [("small-trial", 5), ("small-final", 4)]
    grid = grid_of(study)
    final = grid.trainings["final_pets_seed5"]
    job = SelectingJob(
        name=final.name,
        metric="val/top1",
        trials={c.label: tuple(grid.trainings[n] for n in c.trials) for c in final.candidates},
        jobs={c.label: StageJob(script="", config="") for c in final.candidates},
    )
    with pytest.raises(SystemExit, match="2"):
        job()
    write_trials(grid, PETS)
    assert job.chosen() == "high"


def test_a_failed_trial_keeps_the_final_runs_from_starting(study: Path) -> None:
    write_trials(grid_of(study), PETS)
    failed = "trial_imagenet_low_seed0"
    plan = plan_of(study)
    runs = _StageRuns(
        stage=plan.stages[0], states=plan_states(plan), num_procs=1, parallel=0, say=print,
        stop=StopFlag(), failures=[FailedRun(name=failed, what="x")],
    )  # fmt: skip
    runs._waiting, runs._done = ["final_imagenet_seed5"], set(PETS)
    runs._start_ready()
    assert runs.failures[1].what == f"not started: {failed} failed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("select.axis=momentum", "'momentum' is not one of the axes set, rate"),
        ("select.metric=val/images", "whether more of 'val/images' is better is not known"),
        ("init=null", "low: changes the pre-training, which has no trials"),
        ("select.seeds=[1,1]", "a seed is listed twice"),
        ("table.rows=rate", "'rate' is not one of set"),
        ("select.trials=[optim.lr=1,seed=3]", "the study sets seed itself"),
    ],
)
def test_what_cannot_be_chosen_is_refused(study: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study_of(study, override)


def test_weights_can_be_an_axis(study: Path) -> None:
    axis = """axes:
  - name: model
    values: [{label: B, init: runs/b}, {label: H, init: runs/h}]
"""
    study.write_text(SELECTING.replace("init: runs/before\n", "").replace("axes:\n", axis))
    grid = grid_of(study)
    assert grid.trainings["trial_h_pets_low_seed0"].run.model_dump()["init"] == "runs/h"
    assert len(grid.trainings) == 2 * (5 + 4) and len(selections(*resolve(grid))) == 4
    assert collect(grid, states_of(grid))[0].pretrain is None


def test_trials_are_never_on_the_test_images(study: Path) -> None:
    study.write_text(SELECTING.replace("data.dev_percent=10, ", ""))
    with pytest.raises(UserError, match="(?s)same images, 'test'.*trial_pets.*data.dev_percent"):
        check_held_out(grid_of(study))
    named = "select.trials=[data.val_split=val]"
    check_held_out(grid_of(study, named))


def test_a_cut_without_training_samples_is_one_error(study: Path) -> None:
    study.write_text(SELECTING.replace("dev_percent=10", "dev_percent=99.99"))
    with pytest.raises(UserError) as caught:
        grid_of(study)
    text = caught.value.text()
    assert text.count("99.99 % of 1,000 training samples is 1,000") == 1
    assert "in: trial_pets_low_seed0, trial_pets_high_seed0" in text


def test_the_recipe_of_mae_is_chosen_by_config(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW with layer decay, rates and decays as one axis."""
    monkeypatch.chdir(ROOT)
    text = SELECTING.replace("finetune.yaml", "configs/finetune/mae_b16.yaml").replace(
        "[optim.lr=0.03]", "[optim.lr=0.002, optim.layer_decay=0.75]"
    )
    study.write_text(text)
    grid = grid_of(study)
    run = grid.trainings["trial_pets_high_seed0"].run
    assert (run.optim.name, run.optim.lr, run.optim.layer_decay) == ("adamw", 0.002, 0.75)


def test_table_4_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dosovitskiy et al. 2021, table 4: rates, and the share held out of each set."""
    monkeypatch.chdir(ROOT)
    study = study_of(ROOT / "configs/studies/transfer_vit.yaml")
    rates = {
        value.label: [
            rate.label
            for rate in study.axis("learning rate").values
            if value.label in rate.only.get("set", (value.label,))
        ]
        for value in study.axis("set").values
    }
    small = ["0.001", "0.003", "0.01", "0.03"]
    assert rates.pop("ImageNet") == ["0.003", "0.01", "0.03", "0.06"]
    assert rates == dict.fromkeys(("CIFAR-10", "CIFAR-100", "Pets", "Flowers"), small)
    held_out = [value.finetune.overrides for value in study.axis("set").values]
    assert [each for (each,) in held_out] == [f"data.dev_percent={n}" for n in (1, 2, 2, 10, 10)]


def test_vtab_has_its_19_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    study = study_of(ROOT / "configs/studies/vtab1k.yaml")
    groups = [value.group for value in study.axis("task").values]
    assert [groups.count(name) for name in ("Natural", "Specialized", "Structured")] == [7, 4, 8]
    assert study.select is not None and study.select.mean_over == ("task",)
