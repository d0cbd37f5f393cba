"""`make demo` from start to end on the embedded corpus, with half the training steps.

The accuracy of the full demo in the README is measured by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1500)]


def final_top1(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [row["val/top1"] for row in rows if "val/top1" in row][-1]


def halve(config: Path, schedule: str) -> None:
    """Halve the number in the line `SCHEDULE: NUMBER` of a configuration."""
    text = config.read_text()
    (number,) = re.findall(rf"^  {schedule}: (\d+)$", text, flags=re.M)
    config.write_text(
        text.replace(f"  {schedule}: {number}\n", f"  {schedule}: {int(number) // 2}\n")
    )


def test_the_demo_learns_and_transfers(tmp_path: Path) -> None:
    # The demo writes beside its scripts; a copy keeps it apart from the checkout's runs.
    for name in ("configs", "data_prep", "pretrain", "finetune", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    halve(tmp_path / "configs/demo/pretrain.yaml", "epochs")
    halve(tmp_path / "configs/finetune/demo.yaml", "steps")
    finished = subprocess.run(
        [sys.executable, tmp_path / "launch/demo.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr
    runs = tmp_path / "runs"
    pretrained, finetuned, scratch = (
        final_top1(runs / f"demo-{part}") for part in ("pretrain", "finetune", "scratch")
    )
    # Which of the two is higher is random: one image is 0.28 points.
    assert pretrained >= 0.85 and finetuned >= 0.85
    assert finetuned >= scratch + 0.1
    assert f"{finetuned:.2%}" in finished.stdout and "Try next" in finished.stdout
    report = (runs / "demo/report.html").read_text()
    assert "demo-finetune" in report and "data:image/png;base64" in report
