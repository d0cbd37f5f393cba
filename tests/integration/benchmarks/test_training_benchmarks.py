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

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = ["rates", "checks", "L16", "tax", "H14", "B16", "profile", "data", "timm"]
SECTIONS += ["checkpoint", "start", "variants"]


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
def test_training_benchmarks_measure_everything(tmp_path: Path) -> None:
    """Both at once: starting Python takes most of the time."""
    tax_file = tmp_path / "tax.json"
    gpu = start("gpu_training.py", "--out", tmp_path / "out", "--work", tmp_path)
    tax = start("engine_tax.py", "--ranks", 1, "--work", tmp_path, "--json", tax_file)
    gpu_text, tax_text = gpu.communicate()[0], tax.communicate()[0]
    assert gpu.returncode == 0, gpu_text
    assert tax.returncode == 0, tax_text

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    sections = results["sections"]
    assert set(sections) == set(SECTIONS)
    assert {name: found["status"] for name, found in sections.items()} == dict.fromkeys(
        SECTIONS, "done"
    )
    assert all(math.isfinite(number) for number in numbers(results))
    assert set(sections["tax"]["speed_over_bare"]) == {f"zero {stage}" for stage in range(4)}
    assert set(sections["timm"]["speed_over_timm"]) == {"timm eager", "timm compiled"}
    assert sections["data"]["real_over_synthetic"] > 0
    assert sections["checkpoint"]["stall_over_torch_save"] >= 0
    assert set(sections["checks"]["losses_apart"].values()) == {0.0}, "the same arithmetic"
    assert "now" not in results and "L16" in gpu_text
    assert (tmp_path / "out" / "profile.txt").read_text()

    found = json.loads(tax_file.read_text())["1 ranks"]
    for clock in ("processor", "wall"):
        ratios = [each["median"] for each in found[clock]["over_bare"].values()]
        assert len(ratios) == 3 and all(0 < ratio < 1000 for ratio in ratios)
    assert found["real"]["over_synthetic"] > 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "tax.json"}, "left behind"


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
def test_a_killed_section_leaves_the_others(tmp_path: Path) -> None:
    options = ("--sections", "data,rates", "--out", tmp_path / "out", "--work", tmp_path)
    process = start("gpu_training.py", *options, "--kill-section", "data")
    text = process.communicate()[0]
    assert process.returncode == 1, text
    sections = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    assert sections["data"]["status"] == "failed" and "-9" in sections["data"]["error"]
    assert sections["rates"]["status"] == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "left behind"
