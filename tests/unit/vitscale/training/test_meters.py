"""Tracing of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vitscale.training.meters import PROFILE_SKIPPED, profiled


@pytest.mark.parametrize("missing", [0, 1])
def test_trace_is_written_or_its_absence_reported(tmp_path: Path, missing: int) -> None:
    said: list[str] = []
    with profiled(tmp_path / "run/profile.json", steps=2, say=said.append) as step:
        for _ in range(PROFILE_SKIPPED + 2 - missing):
            torch.ones(2, 2) @ torch.ones(2, 2)
            step()
    if missing:
        assert said == ["no complete trace of 2 steps after the first 5: the run made 6 steps"]
    else:
        trace = json.loads((tmp_path / "run/profile.json").read_text())
        assert said == [] and "aten::mm" in {e.get("name") for e in trace["traceEvents"]}


def test_no_trace_without_steps_or_path(tmp_path: Path) -> None:
    said: list[str] = []
    with profiled(tmp_path / "profile.json", steps=0, say=said.append) as step:
        step()
    assert said == [] and list(tmp_path.iterdir()) == []
