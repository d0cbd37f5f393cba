"""The table of costs, as people call it."""

from __future__ import annotations

import subprocess
import sys

from tests.contract.tree import ROOT
from tests.support.waiting import PATIENCE_S


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.planning.flops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)


def test_figures_are_those_of_the_formula() -> None:
    """ViT-B/16 at 224 px: 86.6 M parameters, 17.58 GMACs forward (timm), six FLOPs a MAC."""
    done = table("B/16", "--image-size", "224", "384", "--peak-tflops", "100", "--mfu", "0.5")
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert rows[0][:5] == ["B/16", "224", "197", "86.6", "105.4"]
    assert rows[1][:3] == ["B/16", "384", "577"]
    assert int(rows[0][5]) == round(50e12 / 105.4e9)


def test_presets_of_every_family_are_known() -> None:
    done = table("R50+B/16", "R50x1")
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert rows[0][:5] == ["R50+B/16", "224", "197", "98.7", "129.2"]
    assert rows[1][:5] == ["R50x1", "224", "-", "25.5", "24.5"]


def test_every_bad_name_and_size_is_reported() -> None:
    done = table("L/16", "XXL/9", "--image-size", "100")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "L/16 at 100 px" in done.stderr and "XXL/9" in done.stderr
