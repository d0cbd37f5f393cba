"""benchmarks/loader_speed.py: it runs, its table has every loader, and its checks can fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loader_speed
from tests.support.levels import by_level

ROOT = Path(__file__).parents[3]
LOADERS = ("webdataset", "torchvision", "opencv", "simplejpeg_torch", "decode_only", "dali")
LOADERS += ("spdl", "region", "region_antialias", "region_streamed", "simplejpeg", "pillow")


def run(*options: object, rc: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/loader_speed.py", "--toy", *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_loader_benchmark_measures_everything(tmp_path: Path) -> None:
    text = run("--work", tmp_path, "--json", tmp_path / "results.json")
    table = text[text.index("img/s  ") :]
    for name in LOADERS:
        assert re.search(rf"^{name} +(\d|left out: )", table, re.MULTILINE), name
    results = json.loads((tmp_path / "results.json").read_text())
    measured = {name: runs[0]["rate"] for name, runs in results["rates"].items()}
    assert {"webdataset", "simplejpeg_torch", "simplejpeg", "pillow"} <= set(measured)
    assert min(measured.values()) > 0
    assert results["pixels"]["pillow"]["identical"] == results["pixels"]["pillow"]["images"] > 0
    assert "index / webdataset" in text and "order of 14.2 M samples" in text
    assert results["memory"]["last_tenth"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"], "left behind"


@pytest.mark.parametrize(
    "options, message",
    [
        (("--json", "/nonexistent/x.json"), r"--json: '/nonexistent/x.json' cannot be written"),
        (("--only", "rates", "--workers", "0"), r"--workers: 0\n  allowed: 1 or more"),
    ],
)
def test_bad_options_are_refused_at_the_start(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    text = run(*options, "--work", tmp_path / "work", rc=2)
    assert re.search(message, text) and "Traceback" not in text
    assert not (tmp_path / "work").exists()


def test_goals_beside_missing_loaders_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = {name: [{"rate": 100.0, "start_s": 1.0}] for name in ("torchvision", "pillow")}
    loader_speed.print_rates(runs, side=32)
    assert "the best rival: 1.00 (1.00 to 1.00); goal 1.7" in capsys.readouterr().out
    loader_speed.print_rates(runs)
    text = capsys.readouterr().out
    assert "pillow / webdataset: not compared, webdataset is left out" in text
    assert "pillow / torchvision, the best rival: 1.00" in text and "goal 6.0" not in text
    loader_speed.print_rates({"pillow": runs["pillow"]})
    assert "the best rival: not compared" in capsys.readouterr().out
    loader_speed.print_rates({"webdataset": [{"rate": 50.0, "start_s": 1.0}], **runs})
    assert "pillow / webdataset: 2.00 (2.00 to 2.00); goal 6.0: MISSED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "what", by_level(["pixels", "labels", "count"], fast=["pixels"], slow=["labels", "count"])
)
def test_loader_benchmark_fails_on_wrong_batches(tmp_path: Path, what: str) -> None:
    encoding = {"pixels": (), "labels": ("--png",), "count": ("--png-side", 32)}[what]
    text = run("--only", "pixels", "--corrupt", what, *encoding, "--work", tmp_path, rc=1)
    assert "FAILED" in text and "Traceback" not in text
    assert not list(tmp_path.iterdir()), "left behind"
