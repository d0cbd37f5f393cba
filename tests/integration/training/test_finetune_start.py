"""Fine-tuning names the checkpoint it starts from and resumes without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.run_states import journal_rows
from tests.support.ranks.warm_ranks import ROOT

pytestmark = pytest.mark.distributed

SETTINGS = [
    *("schedule.steps=6", "schedule.warmup_steps=1", "checkpoint.every_steps=3"),
    *("data.num_workers=0", "data.val_split=null", "engine.device=cpu", "engine.num_threads=1"),
    *("model.width=24", "model.depth=2", "model.mlp_width=48", "model.drop_path=0"),
    *("tracking.uri=null", "tracking.log_every_steps=3", "evaluate=[{name: classification}]"),
]


def finetune(fault_runs: FaultRuns, folder: Path, *settings: str) -> str:
    """Run on one rank and return its output."""
    command: list[str | Path] = [ROOT / "finetune/main.py"]
    command += ["--config", ROOT / "configs/digits/finetune.yaml", *SETTINGS, *settings]
    command.append(f"data.path={fault_runs.shards}")
    folder.mkdir()
    ranks = fault_runs.starter.start(command, num_ranks=1, folder=folder)
    assert wait_all(ranks) == [0], ranks[0].output()
    return ranks[0].output()


def test_finetuning_names_its_start_and_resumes_without_it(
    fault_runs: FaultRuns, killed_copy: Path
) -> None:
    source, first, second = (killed_copy / name for name in ("run", "first", "second"))
    with open(source / "checkpoints/step-00000015/rank-00000.safetensors", "ab") as file:
        file.write(b"x")
    printed = finetune(fault_runs, first, f"init={source}", f"output={first / 'run'}")
    assert "skipping damaged checkpoint" in printed and "step-00000015/rank-00000" in printed
    assert f"starting from {source / 'checkpoints/step-00000010'}, step 10\n" in printed
    rows = journal_rows(first / "run")
    # Remove the initial weights and its own last step.
    source.rename(killed_copy / "moved")
    shutil.rmtree(first / "run/checkpoints/step-00000006")
    printed = finetune(fault_runs, second, f"init={source}", f"output={first / 'run'}")
    assert f"resuming {first / 'run'} at step 3\n" in printed and "starting from" not in printed
    assert journal_rows(first / "run") == rows
