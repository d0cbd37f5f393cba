"""A linear probe resumes exactly, gives the same losses on other ranks, and keeps its trunk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.ranks.warm_ranks import ROOT
from vitscale.checkpoint.folders import resolve_weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RUN = {
    "base": str(ROOT / "configs/digits/finetune.yaml"),
    "objective": {"name": "linear_probe"},
    "optim": {"name": "lars", "lr": 1.0, "clip_norm": None},
    "model": {"width": 24, "depth": 2, "mlp_width": 48, "drop_path": 0.0, "head_std": 0.01},
    "data": {"num_workers": 0},
    "engine": {"device": "cpu", "num_threads": 1, "zero_stage": 0, "max_micro_batch": 16},
    "schedule": {"steps": 6, "warmup_steps": 1},
    "checkpoint": {"every_steps": 3},
    "evaluate": [{"name": "classification"}],
    "tracking": {"uri": None, "log_every_steps": 3},
}


def probe(fault_runs: FaultRuns, folder: Path, *, num_ranks: int) -> Path:
    """Run in FOLDER/run and return it."""
    folder.mkdir(exist_ok=True)
    data = {**RUN["data"], "path": str(fault_runs.shards)}  # type: ignore[dict-item]  # a section
    values = {**RUN, "output": str(folder / "run"), "data": data}
    (folder / "probe.yaml").write_text(yaml.safe_dump(values))
    command: list[str | Path] = [ROOT / "finetune/main.py", "--config", folder / "probe.yaml"]
    ranks = fault_runs.starter.start(command, num_ranks=num_ranks, folder=folder)
    assert set(wait_all(ranks)) == {0}, ranks[0].output()
    return folder / "run"


def test_a_linear_probe_resumes_and_moves(fault_runs: FaultRuns, tmp_path: Path) -> None:
    first = probe(fault_runs, tmp_path / "first", num_ranks=1)
    rows = journal_rows(first)
    trunk = [resolve_weights(str(first))[0].tensors(prefix="model.")]
    shutil.copytree(tmp_path / "first", tmp_path / "again")
    again = tmp_path / "again/run"
    shutil.rmtree(again / "checkpoints/step-00000006")
    probe(fault_runs, tmp_path / "again", num_ranks=1)
    assert differences(read_state(again), read_state(first)) == []
    trunk.append(
        resolve_weights(str(again / "checkpoints/step-00000003"))[0].tensors(prefix="model.")
    )
    frozen = [name for name in trunk[0] if not name.startswith("head.1.")]
    assert "head.0.variance" in frozen and "blocks.1.mlp.fc2.weight" in frozen
    assert all(torch.equal(trunk[0][name], trunk[1][name]) for name in frozen)
    assert trunk[0]["head.0.mean"].abs().sum() > 0
    assert not torch.equal(trunk[0]["head.1.weight"], trunk[1]["head.1.weight"])
    other = probe(fault_runs, tmp_path / "other", num_ranks=2)
    for ours, theirs in zip(journal_rows(other), rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
