"""A run that changes its image size resumes bit by bit, wherever it was interrupted.

24 steps on two ranks: 12 at 8 px in one micro-batch a step, 12 at 16 px in two. A save falls on
every fifth step and on the change.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import (
    FaultRuns,
    fault,
    newest_step,
    output,
    wait_and_end_others,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CHANGE = 12
SIZES = (
    "schedule.resolutions=[{image_size: 8, until: 0.5, max_micro_batch: 8}, {image_size: 16}]",
)
# Of rank 1: place, number of the call, what happens.
KILLS = {
    "before the change": ("backward", 8, "kill"),
    "at the start of the change": ("change", 1, "lag and kill"),
    "at the end of the change": ("change", 1, "kill after"),
    # The thirteenth step has two micro-batches.
    "in the second step after it": ("backward", 12 + 2 + 1, "kill"),
}


def killed(fault_runs: FaultRuns, folder: Path, kill: str, *settings: str) -> None:
    ranks = fault_runs.start(folder, *settings, faults={1: [fault(*KILLS[kill])]})
    assert wait_and_end_others(ranks)[1] == -signal.SIGKILL, output(folder)


@pytest.mark.parametrize(
    ("zero_stage", "kill"), [*((0, kill) for kill in KILLS), (3, "at the end of the change")]
)
def test_resume_across_a_change_is_exact(
    fault_runs: FaultRuns, tmp_path: Path, zero_stage: int, kill: str
) -> None:
    settings = (*SIZES, f"engine.zero_stage={zero_stage}")
    killed(fault_runs, tmp_path, kill, *settings)
    assert newest_step(tmp_path) in ((5, 10) if kill.startswith("before") else (10, CHANGE))
    fault_runs.assert_resumes_exactly(tmp_path, *settings)


def test_both_sizes_are_trained_logged_and_saved(fault_runs: FaultRuns) -> None:
    state = fault_runs.uninterrupted(*SIZES, "engine.zero_stage=0")
    assert state.description["grid"] == [4, 4]
    assert state.description["resolutions"] == [[8, 0.5], [16, None]]
    kinds = ("model", "ema", "exp_avg", "exp_avg_sq")
    assert {tuple(state.tensors[f"{kind}.pos_embed"].shape) for kind in kinds} == {(1, 17, 24)}
    assert state.tensors["exp_avg_sq.pos_embed"].min() >= 0
    sizes = {row["step"]: row["train/image_size"] for row in state.journal if "train/lr" in row}
    assert sizes == {step: 8 if step <= CHANGE else 16 for step in range(4, 25, 4)}


def test_a_change_passes_to_another_number_of_ranks(fault_runs: FaultRuns, tmp_path: Path) -> None:
    """Killed with a checkpoint of the smaller grid, resumed on one rank at ZeRO 3."""
    settings = (*SIZES, "engine.zero_stage=0")
    killed(fault_runs, tmp_path, "at the end of the change", *settings)
    assert newest_step(tmp_path) == CHANGE
    resumed = (*SIZES, "engine.zero_stage=3")
    state = fault_runs.finish(tmp_path, *resumed, num_ranks=1)
    assert state.step == 24 and state.tensors["model.pos_embed"].shape == (1, 17, 24)


def test_another_list_of_sizes_is_refused(fault_runs: FaultRuns, tmp_path: Path) -> None:
    killed(fault_runs, tmp_path, "at the end of the change", *SIZES, "engine.zero_stage=0")
    changed = SIZES[0].replace("0.5", "0.6")
    assert set(fault_runs.run(tmp_path, changed, "engine.zero_stage=0")) == {2}
    assert "resolutions: checkpoint [[8, 0.5], [16, None]], now" in output(tmp_path)
