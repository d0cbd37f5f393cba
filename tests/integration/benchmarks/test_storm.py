"""benchmarks/faults/kill_storm.py: it passes, keeps its ledger, and its comparison can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks.run_states import RunState, differences
from tests.support.ranks.warm_ranks import ROOT


@pytest.mark.slow
@pytest.mark.distributed
def test_a_small_storm_passes(digits_shards: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    options = ["--kills", "2", "--steps", "16", "--seed", "3"]
    command = [sys.executable, ROOT / "benchmarks/faults/kill_storm.py", *options]
    places = ["--ledger", ledger, "--shards", digits_shards, "--work", tmp_path / "work"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    faults = [row for row in rows if "kills" in row]
    assert sum(row["kills"] for row in faults) >= 2
    assert all(row["seed"] == 3 and row["lost_steps"] <= 14 for row in faults)
    assert [row["equal"] for row in rows if "equal" in row] == [True] * (len(rows) - len(faults))
    assert "bit by bit" in done.stdout


def state() -> RunState:
    return RunState(
        step=3,
        progress={"optimizer_steps": 3},
        description={"seed": 0},
        tensors={"model.w": torch.tensor([1.0, float("nan")]), "ema.w": torch.zeros(2)},
        journal=[{"step": 3, "train/loss": 1.5}],
        batches={(0, 2, 1): ("aa", "bb")},
    )


CHANGES = {
    "step": {"step": 2},
    "progress": {"progress": {"optimizer_steps": 2}},
    "description": {"description": {"seed": 1}},
    "last bit": {
        "tensors": {"model.w": torch.tensor([1.0000001, float("nan")]), "ema.w": torch.zeros(2)}
    },
    "sign of zero": {"tensors": {**state().tensors, "ema.w": torch.tensor([0.0, -0.0])}},
    "tensor gone": {"tensors": {"model.w": state().tensors["model.w"]}},
    "journal": {"journal": [{"step": 3, "train/loss": 1.5000000000000002}]},
    "row gone": {"journal": []},
    "sample": {"batches": {(0, 2, 1): ("aa", "bc")}},
    "order of samples": {"batches": {(0, 2, 1): ("bb", "aa")}},
    "batch gone": {"batches": {}},
    "batch that came changed": {"contradictions": ["rank 0"]},
}


def test_equal_states_have_no_differences() -> None:
    assert differences(state(), state()) == []


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_a_difference(change: str) -> None:
    assert len(differences(replace(state(), **CHANGES[change]), state())) == 1
