"""The figures of a study."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from PIL import Image

from launch.studies.figure import Series, draw, panel_series, power_of_ten, short_number
from launch.studies.grid import Grid
from launch.studies.results import collect
from launch.studies.states import states_of
from tests.support.study_runs import STUDY, grid_of, write_all, write_study, write_training


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(grid: Grid, panel: str | None = None) -> dict[str, Series]:
    results = collect(grid, states_of(grid))
    lines = panel_series(grid.study, grid.study.figures[0], results, panel=panel)
    return {line.name: line for line in lines}


def test_lines_have_the_values_and_their_spread(folder: Path) -> None:
    grid = grid_of(write_study(folder, STUDY))
    write_all(grid, {"finetune_wide_1_seed0": 0.7, "finetune_wide_1_seed1": 0.8})
    wide = lines_of(grid)["wide"]
    assert [point.x for point in wide.points] == [10, 1000]
    assert [round(point.y, 6) for point in wide.points] == [75, 50]
    assert [round(point.spread or 0, 3) for point in wide.points] == [7.071, 0]


def test_a_family_is_one_line_over_compute(folder: Path) -> None:
    text = STUDY.replace("x: pretrain_images", "x: pretrain_flops")
    grid = grid_of(write_study(folder, text), "seeds=[0]")
    write_all(grid, {})
    narrow, wide = lines_of(grid)["ViT"].points
    assert (narrow.label, wide.label) == ("narrow", "wide")
    assert 0 < narrow.x < wide.x


def test_a_baseline_from_scratch_is_a_level(folder: Path) -> None:
    """It has no place on a logarithmic axis; its equal results are one level."""
    grid = grid_of(write_study(folder))
    write_all(grid, {"finetune_scratch_seed0": 0.2, "finetune_scratch_seed1": 0.2})
    scratch = lines_of(grid)["scratch"]
    assert scratch.is_level and [point.y for point in scratch.points] == [20]


def test_panels_divide_the_results(folder: Path) -> None:
    text = STUDY.replace("series: model}", "series: model, panels: images}")
    text = text.replace("x: pretrain_images", "x: model")
    grid = grid_of(write_study(folder, text), "seeds=[0]")
    write_all(grid, {"finetune_wide_1_seed0": 0.7})
    few, all_images = (lines_of(grid, panel)["wide"] for panel in ("1 %", "100 %"))
    assert [round(point.y) for point in few.points] == [70]
    assert [round(point.y) for point in all_images.points] == [50]


def test_figures_are_written_as_svg_and_png(folder: Path) -> None:
    grid = grid_of(write_study(folder), "figures=[{name: A B, x: pretrain_images, series: model}]")
    write_all(grid, {})
    results = collect(grid, states_of(grid))
    paths = draw(grid.study, results, folder=folder / "new")
    assert [path.name for path in paths] == ["a-b.svg"]
    first = paths[0].read_bytes()
    with Image.open(folder / "new/a-b.png") as image:
        assert image.width > image.height > 400
    assert draw(grid.study, results, folder=folder / "new")[0].read_bytes() == first


def test_long_labels_leave_the_axes_room(folder: Path) -> None:
    """With x and lines of one axis the labels below are enough, wrapped; no legend."""
    text = STUDY.replace("x: pretrain_images, series: model", "x: model, series: model")
    for label in ("narrow", "wide"):
        longer = f"{label} enough for a label of very many lines that is longer than most are"
        text = text.replace(f"label: {label}", f"label: {longer}")
    grid = grid_of(write_study(folder, text), "seeds=[0]")
    write_all(grid, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's: "axes sizes collapsed"
        assert draw(grid.study, collect(grid, states_of(grid)), folder=folder)


def test_nothing_is_drawn_without_results(folder: Path) -> None:
    grid = grid_of(write_study(folder))
    write_training(grid.trainings["pretrain_wide_1_seed0"], step=20)
    assert draw(grid.study, collect(grid, states_of(grid)), folder=folder) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(10, "10"), (999, "999"), (1000, "1k"), (12_800, "12.8k"), (999_999, "1M"), (3.03e8, "303M")],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short_number(number) == text


def test_powers_of_ten_are_written_as_such() -> None:
    assert power_of_ten(1e18) == "$10^{18}$"
    assert power_of_ten(5e10) == r"$5\cdot10^{10}$"
