"""The training benchmarks run from end to end at toy sizes, and report failures."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.plan import CALLS, GOALS, GRACE_S, MAX_CALL_S, SECTIONS, VARIANTS
from benchmarks.training.report import between, goal_rows, variant_rows

ROOT = Path(__file__).resolve().parents[3]


def start(script: str, *options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "benchmarks" / script, "--toy", *map(str, options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


@pytest.mark.slow
def test_engine_tax_measures_every_loop(tmp_path: Path) -> None:
    tax_file = tmp_path / "tax.json"
    tax = start("engine_tax.py", "--ranks", 1, "--work", tmp_path, "--json", tax_file)
    text = tax.communicate()[0]
    assert tax.returncode == 0, text
    found = json.loads(tax_file.read_text())["1 ranks"]
    for clock in ("processor", "wall"):
        ratios = [each["median"] for each in found[clock]["over_bare"].values()]
        assert len(ratios) == 3 and all(0 < ratio < 1000 for ratio in ratios)
    assert found["real"]["over_synthetic"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["tax.json"], "left behind"


@pytest.mark.slow
def test_step_cost_is_a_share_of_the_supervised_step() -> None:
    options = ("--preset", "Ti/16", "--batch", "2", "--rounds", "1")
    text = subprocess.run(
        [sys.executable, ROOT / "benchmarks/training/step_cost.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"cost ([0-9.]+), FLOPs ([0-9.]+): ", text)
    assert found is not None, text
    cost, flops = map(float, found.groups())
    # Ti's decoder is larger than its encoder; a quarter of the patches goes through the encoder.
    assert cost > 0 and flops > 1


@pytest.mark.slow
@pytest.mark.distributed
def test_engine_tax_on_two_ranks(tmp_path: Path) -> None:
    process = start("engine_tax.py", "--ranks", 2, "--work", tmp_path, "--json", tmp_path / "j")
    text = process.communicate()[0]
    assert process.returncode == 0, text
    found = json.loads((tmp_path / "j").read_text())["2 ranks"]
    assert set(found["processor"]["over_bare"]) == {"zero0", "zero1", "loop"}


@pytest.mark.slow
def test_sections_are_measured_and_killed_alone(tmp_path: Path) -> None:
    options = ("--sections", "data,tax", "--out", tmp_path / "out", "--work", tmp_path)
    process = start("gpu_training.py", *options, "--kill-section", "data")
    text = process.communicate()[0]
    assert process.returncode == 1, text
    results = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    assert results["data"]["status"] == "failed" and "-9" in results["data"]["error"]
    tax = results["tax"]
    assert tax["status"] == "done" and "wrong" not in tax, tax
    assert set(tax["speed_over_bare"]) == {f"zero {stage}" for stage in range(4)}
    assert set(tax["loss_gaps"].values()) == {0.0}, "the same arithmetic"
    assert all(math.isfinite(number) for number in numbers(tax))
    assert "ZeRO 1 / bare compiled loop" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "left behind"


def test_calls_of_the_gpu_benchmark_fit_into_their_limit() -> None:
    for number, sections in CALLS.items():
        assert sum(section.seconds for section in sections) <= MAX_CALL_S - GRACE_S, number
    assert {goal.section for goal in GOALS} <= set(SECTIONS)


def test_the_report_compares_with_goals_and_predictions() -> None:
    speed = {"median": 1.04, "low": 1.03, "high": 1.05}
    variant = VARIANTS[0]
    name, other = (f"{each.model} {each.what}" for each in VARIANTS[:2])
    sections = {
        "L16": {"of_matmul": 0.71, "memory": {"peak_over_estimate": 1.2}},
        "H14": {"of_matmul": 0.6, "memory": None},
        "variants": {
            "rows": {name: {"speed_over_base": speed}},
            "left_out": {other: "no such setting yet: model.patches"},
        },
    }
    rows = {row[:38].strip(): row[38:].split() for row in goal_rows(sections)[1:]}
    assert rows["L/16 / bf16 matrix rate"] == [">=", "0.7", "0.56-0.64", "0.710", "reached"]
    assert rows["H/14 / bf16 matrix rate"][-2:] == ["0.600", "missed"]
    assert rows["peak memory of L/16 / --dry-run"][-2:] == ["1.200", "missed"]
    assert rows["peak memory of H/14 / --dry-run"][-1] == "-"
    measured, left_out = variant_rows(sections["variants"])[1:]
    assert measured.split()[-5:] == [between(variant.predicted), "1.040", "1.030", "to", "1.050"]
    assert left_out.endswith("no such setting yet: model.patches")
