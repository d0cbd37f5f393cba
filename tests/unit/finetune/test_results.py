"""The table of results, as text and in files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from finetune.results import as_rows, text_table, write_results
from vitscale.evaluation.evaluation import Share


def test_metrics_without_an_interval_say_why() -> None:
    metrics = {"few_shot5_top1": 0.5, "few_shot5_std": 0.1, "class_mean_top1": 0.25}
    *_, first, second = text_table(as_rows("x", metrics, image_size=8)).splitlines()
    assert first == "class_mean_top1 has no interval: it is a mean over classes"
    assert second.startswith("few_shotK_top1 has no interval: it is a mean over draws")
    one_draw = as_rows("few_shot", {"few_shot5_top1": Share(3, 4)}, image_size=8)
    assert "no interval" not in text_table(one_draw)


def test_files_hold_the_same_numbers(tmp_path: Path) -> None:
    metrics = {"top1": Share(3, 4), "loss": math.nan}
    rows = as_rows("classification", metrics, image_size=24)
    write_results(tmp_path, rows, description={"name": "demo"})
    stored = json.loads((tmp_path / "results.json").read_text())
    with open(tmp_path / "results.csv") as file:
        table = list(csv.DictReader(file))
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert stored["name"] == "demo" and len(stored["results"]) == len(table) == len(lines) - 2 == 2
    assert stored["results"][0]["value"] == float(table[0]["value"]) == 0.75
    assert stored["results"][0]["low"] == float(table[0]["low"]) == Share(3, 4).interval()[0]
    assert stored["results"][1]["value"] is None and table[1]["low"] == ""
    assert lines[2] == "| 24 | classification | top1 | 0.7500 | 0.3006 to 0.9544 | 4 |"
