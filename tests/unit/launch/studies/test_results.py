"""The table of a study."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from launch.comparison.text import plain_text
from launch.studies.grid import Grid
from launch.studies.results import check_metrics, collect, shown_value, table, write_csv
from launch.studies.states import states_of
from tests.support.study_runs import grid_of, write_all, write_study, write_training
from vitscale.config.errors import UserError, UserErrors


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grid:
    monkeypatch.chdir(tmp_path)
    return grid_of(write_study(tmp_path))


VALUES = {"finetune_narrow_1_seed0": 0.7, "finetune_narrow_1_seed1": 0.8}


def test_results_are_mean_and_spread_over_seeds(grid: Grid) -> None:
    write_all(grid, VALUES)
    first, *_, last = collect(grid, states_of(grid))
    assert first.mean == pytest.approx(0.75)
    assert first.spread == pytest.approx(0.1 / 2**0.5)  # the sample standard deviation
    assert last.spread == 0 and last.pretrain is None


def test_unfinished_cells_are_left_out(grid: Grid) -> None:
    for name in ("pretrain_narrow_1_seed0", "pretrain_narrow_1_seed1"):
        write_training(grid.trainings[name], step=20)
    write_training(grid.trainings["finetune_narrow_1_seed0"], step=12, value=0.7)
    write_training(grid.trainings["finetune_narrow_1_seed1"], step=6, value=0.1)
    first, second, *_ = collect(grid, states_of(grid))
    assert first.by_seed == {0: 0.7} and first.spread is None
    assert second.mean is None
    lines = plain_text(table(grid, collect(grid, states_of(grid)))).splitlines()
    assert lines[2].endswith(" 70.00 %   1 of 2") and lines[3].split()[-4] == "-"


def test_the_csv_has_every_seed(grid: Grid) -> None:
    write_all(grid, VALUES)
    path = write_csv(grid, collect(grid, states_of(grid)), folder=Path("results"))
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 6
    first, last = rows[0], rows[-1]
    assert (first["model"], first["images"]) == ("narrow", "1 %")
    assert (first["pretrain_images"], first["images_seen"]) == ("10", "200")
    assert (first["seed_0"], first["seed_1"], float(first["mean"])) == ("0.7", "0.8", 0.75)
    assert int(first["pretrain_flops"]) == grid.trainings["pretrain_narrow_1_seed0"].flops
    assert last["pretrain_flops"] == "0"


def test_an_absent_metric_names_those_there_are(tmp_path: Path, grid: Grid) -> None:
    write_all(grid, {})
    other = grid_of(tmp_path / "study.yaml", "metric=val/top9")
    with pytest.raises(UserError, match="(?s)no val/top9 at the last step.*allowed: val/loss, val"):
        collect(other, states_of(other))


def test_metrics_are_checked_before_any_run(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path)
    check_metrics(grid_of(study, "metric=val/loss", "other_metrics=[val/top5,train/loss]"))
    with pytest.raises(UserErrors, match=r"(?s)val/topp1 is no result.*in: .*val/top1, val/top5"):
        check_metrics(grid_of(study, "metric=val/topp1"))
    for name in ("knn_top1", "knn9_top1", "few_shot2_std", "ema_few_shot2_std"):
        with pytest.raises(UserErrors, match=f"val/{name} is no result"):
            check_metrics(grid_of(study, f"other_metrics=[val/{name}]"))
        probes = "evaluate=[{name: knn, also_k: [9]}, {name: few_shot, shots: [2]}]"
        overrides = f"finetune.overrides=['{probes}', 'optim.ema={{decay: 0.9}}']"
        check_metrics(grid_of(study, f"metric=val/{name}", overrides))


def test_a_metric_of_an_earlier_step_does_not_count(tmp_path: Path, grid: Grid) -> None:
    write_all(grid, {})
    other = grid_of(tmp_path / "study.yaml", "metric=val/loss")
    with pytest.raises(UserError, match="no val/loss at the last step, 12"):
        collect(other, states_of(other))


def test_shares_are_shown_in_per_cent() -> None:
    assert shown_value(0.8125, 0.01, metric="val/top1") == "81.25 ± 1.00 %"
    assert shown_value(1.5, None, metric="val/loss") == "1.5000"
    assert shown_value(None, None, metric="val/top1") == "-"
