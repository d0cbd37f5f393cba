"""Help and configuration errors come at once: nothing heavy is imported on the way there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.tree import ROOT, imports_of, module_files, scripts
from tests.support.waiting import PATIENCE_S

HEAVY = ("torch", "deepspeed", "timm", "mlflow", "webdataset")
# Time follows: about a second for the 464 of the largest. With torch it would be over a thousand.
MAX_MODULES = 600
RUN_AND_REPORT = """
import atexit, json, os, runpy, sys
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
def report():
    found = {"modules": sorted(sys.modules)}
    open(os.environ["REPORT"], "w").write(json.dumps(found))
atexit.register(report)
runpy.run_path(script, run_name="__main__")
"""


def start(module: str, *arguments: str, folder: Path) -> tuple[dict[str, Any], str]:
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_REPORT, str(module_files()[module]), *arguments],
        cwd=folder,
        env=os.environ | {"REPORT": str(report)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert report.exists(), done.stderr
    found = json.loads(report.read_text()) | {"code": done.returncode}
    return found, done.stdout + done.stderr


def assert_light(report: dict[str, Any]) -> None:
    assert not [name for name in HEAVY if name in report["modules"]]
    assert len(report["modules"]) < MAX_MODULES


@pytest.mark.parametrize("module", sorted(scripts()))
def test_help_is_light(module: str, tmp_path: Path) -> None:
    report, output = start(module, "--help", folder=tmp_path)
    assert report["code"] == 0, output
    assert "usage" in output.lower()
    assert_light(report)


WITH_CONFIG = sorted(m for m in scripts() if "vitscale.config.command_line" in imports_of(m))


@pytest.mark.parametrize("module", WITH_CONFIG)
def test_configuration_errors_are_light(module: str, tmp_path: Path) -> None:
    stage = {"data_prep": "data_prep", "finetune": "finetune"}.get(module.split(".")[0], "pretrain")
    config = tmp_path / "wrong.yaml"
    config.write_text(f"stage: {stage}\nno_such_key: 1\nseed: many\n")
    report, output = start(module, "--config", str(config), "lr", folder=tmp_path)
    assert report["code"] == 2, output
    assert "Traceback" not in output
    for part in ("wrong.yaml:2: no_such_key", "wrong.yaml:3: seed", "'lr' is not key=value"):
        assert part in output
    assert_light(report)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "wrong.yaml"]


def test_scripts_with_a_configuration_were_found() -> None:
    expected = {"data_prep.make_shards", "pretrain.main", "finetune.main", "launch.slurm"}
    assert expected <= set(WITH_CONFIG)
    assert (ROOT / "configs").is_dir()
