"""benchmarks/faults/bit_flips.py finds every flip that has an effect."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks.rank_processes import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.mark.slow
@pytest.mark.distributed
def test_every_flip_with_an_effect_is_found() -> None:
    """Two at each stage and precision."""
    command = [sys.executable, ROOT / "benchmarks/faults/bit_flips.py", "--flips", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 found" in done.stdout
