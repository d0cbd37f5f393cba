"""The tables of a study, as papers have them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from launch.studies.grid import StudyTraining
from launch.studies.results import StudyResult
from launch.studies.settings import AxisValue, StudyRun
from launch.studies.tables import csv_text, markdown, markdown_page, paper_table, printed
from tests.support.study_runs import study_of

STUDY = """\
stage: study
name: vtab
init: runs/before
finetune: {file: finetune.yaml}
axes:
  - name: task
    values:
      - {label: Pets, group: Natural}
      - {label: SVHN, group: Natural}
      - {label: KITTI, group: Structured}
  - name: model
    values: [{label: B/16}, {label: "L|16"}]
table: {rows: task}
"""


@pytest.fixture
def study(tmp_path: Path) -> StudyRun:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return study_of(path)


def results(study: StudyRun, values: dict[tuple[str, str], dict[int, float]]) -> list[StudyResult]:
    def value(axis: str, label: str) -> AxisValue:
        return next(each for each in study.axis(axis).values if each.label == label)

    no_run: Any = None  # tables do not look at it
    training = StudyTraining(name="x", run=no_run, labels={}, kind="final")
    return [
        StudyResult(
            metric="val/top1",
            values={"task": value("task", task), "model": value("model", model)},
            training=training,
            pretrain=None,
            by_seed=by_seed,
            num_seeds=2,
        )
        for (task, model), by_seed in values.items()
    ]


VALUES = {
    ("Pets", "B/16"): {0: 0.9, 1: 0.8},
    ("SVHN", "B/16"): {0: 0.5, 1: 0.6},
    ("KITTI", "B/16"): {0: 0.1, 1: 0.1},
    ("Pets", "L|16"): {0: 1.0, 1: 1.0},
    ("SVHN", "L|16"): {0: 0.5},
    ("KITTI", "L|16"): {},
}


def test_groups_and_all_rows_have_unweighted_means(study: StudyRun) -> None:
    """The spread of a mean is that of the means of the seeds: (0.9 + 0.5) / 2 both times."""
    table = printed(paper_table(study, results(study, VALUES)))
    assert table.header == ("task", "B/16", "L|16")
    assert table.rows == (
        ("Pets", "85.00 ± 7.07 %", "100.00 ± 0.00 %"),
        ("SVHN", "55.00 ± 7.07 %", "50.00 %"),
        ("mean of 2 Natural", "70.00 ± 0.00 %", "75.00 %"),
        ("KITTI", "10.00 ± 0.00 %", "-"),
        ("mean of 1 Structured", "10.00 ± 0.00 %", "-"),
        ("mean of 3", "50.00 ± 0.00 %", "-"),
    )


def test_the_page_is_markdown(study: StudyRun) -> None:
    table = paper_table(study, results(study, VALUES))
    page = markdown_page(study, [table], None, num_seeds=2)
    assert page.startswith("# vtab\n\nValues after the last step; 2 seeds: mean ± standard deviat")
    assert "## val/top1\n\n| task | B/16 | L\\|16 |\n| --- | --- | --- |\n| Pets | 85.00" in page
    assert markdown(printed(table)).count("\n") == 2 + 2 + 6


def test_the_csv_is_not_rounded(study: StudyRun) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text([paper_table(study, results(study, VALUES))]))))
    assert len(rows) == 6 * 2 and float(rows[0]["std"]) == pytest.approx(0.1 / 2**0.5)
    assert (rows[1]["column"], rows[-1]["mean"]) == ("L|16", "")


def test_a_single_column_is_named_after_the_metric(study: StudyRun) -> None:
    found = results(study, {("Pets", "B/16"): {0: 0.5}})
    alone = [
        StudyResult(
            metric=each.metric, values={"task": each.values["task"]}, training=each.training,
            pretrain=None, by_seed=each.by_seed, num_seeds=1,
        )
        for each in found
    ]  # fmt: skip
    assert paper_table(study, alone).columns == ("val/top1",)
