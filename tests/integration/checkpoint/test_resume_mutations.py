"""The comparison of resumed runs notices any part of the state that is dropped.

A run killed in step 17 resumes from step 15 in a process in which one part of the state is dropped
or one key ignores the position. docs/faults.md lists state that is not kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.levels import by_level
from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.resume_mutants import MUTANTS
from tests.support.ranks.run_states import differences, read_state

pytestmark = pytest.mark.distributed

# What must differ, at least.
FOUND = {
    "weights": "tensors: ema, exp_avg, exp_avg_sq, model",
    "one bit of one weight": "tensors: ",
    "first moments": "tensors: ema, exp_avg, exp_avg_sq, model",
    "second moments": "tensors: ema, exp_avg, exp_avg_sq, model",
    "average of the weights": "tensors: ema",
    "step count of the optimiser": "progress optimizer_steps",
    "counters of skipped updates": "progress engine",
    "update count of the average": "progress engine",
    "loss sums of the log interval": "journal",
    "recent losses of the spike detector": "progress spikes",
    "everything": "tensors: ema, exp_avg, exp_avg_sq, model",
    "data position": "tensors: ema, exp_avg, exp_avg_sq, model",
    "one batch": "tensors: ema, exp_avg, exp_avg_sq, model",
    "step of the loop": "",
    "mixup key": "tensors: ema, exp_avg, exp_avg_sq, model",
    "augmentation key": "tensors: ema, exp_avg, exp_avg_sq, model",
    "dropout and drop path key": "tensors: ema, exp_avg, exp_avg_sq, model",
    "schedule": "tensors: ema, exp_avg, exp_avg_sq, model",
    "last logged step": "journal",
}


def test_every_mutant_has_an_expectation() -> None:
    assert MUTANTS.keys() == FOUND.keys()


@pytest.mark.exhaustive
def test_without_a_mutation_nothing_differs(fault_runs: FaultRuns, killed_copy: Path) -> None:
    fault_runs.assert_resumes_exactly(killed_copy)


@pytest.mark.parametrize("mutant", by_level(MUTANTS, slow={"everything"}))
def test_dropped_state_is_noticed(fault_runs: FaultRuns, killed_copy: Path, mutant: str) -> None:
    ranks = fault_runs.start(killed_copy, mutant=mutant)
    codes = wait_all(ranks)
    said = ranks[0].output()
    assert "Traceback" not in said or mutant == "step of the loop", said
    if codes == [0, 0]:
        found = differences(read_state(killed_copy / "run"), fault_runs.uninterrupted())
        assert any(FOUND[mutant] in line for line in found), found
    else:
        assert mutant == "step of the loop", said
