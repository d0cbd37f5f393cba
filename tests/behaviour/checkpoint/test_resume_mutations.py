"""The comparison of resumed runs notices any part of the state that is dropped.

A run killed in step 17 resumes from step 15 in a process in which one part of the state is dropped
or one key ignores the position.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.run_states import differences, read_state

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ALL = "tensors: ema, exp_avg, exp_avg_sq, model"
# What must differ, at least.
FOUND = {
    "weights": ALL,
    "second moments": ALL,
    "average of the weights": "tensors: ema",
    "step count of the optimiser": "progress optimizer_steps",
    "data position": ALL,
    "dropout and drop path key": ALL,
}


@pytest.mark.parametrize("mutant", FOUND)
def test_dropped_state_is_noticed(fault_runs: FaultRuns, killed_copy: Path, mutant: str) -> None:
    ranks = fault_runs.start(killed_copy, mutant=mutant)
    assert wait_all(ranks) == [0, 0], ranks[0].output()
    found = differences(read_state(killed_copy / "run"), fault_runs.uninterrupted())
    assert any(FOUND[mutant] in line for line in found), found
