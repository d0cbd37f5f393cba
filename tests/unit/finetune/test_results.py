"""The table of results, as text and in files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from finetune.evaluating.results import EvaluationResult, as_results, text_table, write_results
from vitscale.evaluation.evaluation import Share


def results() -> list[EvaluationResult]:
    rows = as_results("classification", {"top1": Share(3, 4), "loss": math.nan}, image_size=24)
    return rows + as_results("other", {"images_per_s": 12345.67}, image_size=32)


def test_metrics_without_an_interval_say_why() -> None:
    metrics = {"few_shot5_top1": 0.5, "few_shot5_std": 0.1, "class_mean_top1": 0.25}
    *_, first, second = text_table(as_results("x", metrics, image_size=8)).splitlines()
    assert first == "class_mean_top1 has no interval: it is a mean over classes"
    assert second.startswith("few_shotK_top1 has no interval: it is a mean over draws")
    one_draw = as_results("few_shot", {"few_shot5_top1": Share(3, 4)}, image_size=8)
    assert "no interval" not in text_table(one_draw)


def test_files_hold_the_same_numbers(tmp_path: Path) -> None:
    write_results(tmp_path, results(), description={"name": "demo"})
    stored = json.loads((tmp_path / "results.json").read_text())
    with open(tmp_path / "results.csv") as file:
        rows = list(csv.DictReader(file))
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert stored["name"] == "demo" and len(stored["results"]) == len(rows) == len(lines) - 2 == 3
    assert stored["results"][0]["value"] == float(rows[0]["value"]) == 0.75
    assert stored["results"][0]["low"] == float(rows[0]["low"]) == Share(3, 4).interval()[0]
    assert stored["results"][1]["value"] is None and rows[1]["low"] == ""
    assert lines[2] == "| 24 | classification | top1 | 0.7500 | 0.3006 to 0.9544 | 4 |"
