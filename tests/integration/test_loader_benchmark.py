"""benchmarks/loader.py: it runs, its table holds every loader, and its checks can fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADERS = ("webdataset", "torchvision", "opencv", "simplejpeg_torch", "decode_only", "dali")
LOADERS += ("spdl", "region", "region_antialias", "simplejpeg", "pillow")


def run(*options: object, rc: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "loader.py", "--quick", *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


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


@pytest.mark.parametrize("what", ["pixels", "labels", "count"])
def test_loader_benchmark_fails_on_wrong_batches(tmp_path: Path, what: str) -> None:
    text = run("--only", "pixels", "--spoil", what, "--work", tmp_path, rc=1)
    assert "FAILED" in text and "Traceback" not in text
    assert not list(tmp_path.iterdir()), "left behind"
