"""Ranks started warm equal ranks started cold."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import SETTINGS, FaultRuns, fault, wait_for_hold
from tests.support.ranks.rank_processes import run_ranks
from tests.support.ranks.run_states import differences, read_state
from tests.support.ranks.warm_ranks import ROOT, session_of
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_warm_start_equals_cold_start(fault_runs: FaultRuns, tmp_path: Path) -> None:
    config = ROOT / "configs/digits/pretrain.yaml"
    places = [f"data.path={fault_runs.shards}", f"output={tmp_path / 'run'}"]
    command = [ROOT / "pretrain/main.py", "--config", config, *SETTINGS, *places]
    environment = {"OMP_NUM_THREADS": "1"}
    finished = run_ranks(command, num_ranks=2, cwd=tmp_path, env=environment)
    assert [code for code, _ in finished] == [0, 0], finished[0][1]
    assert differences(read_state(tmp_path / "run"), fault_runs.uninterrupted()) == []


@pytest.mark.slow
def test_each_rank_leads_its_own_session(fault_runs: FaultRuns, tmp_path: Path) -> None:
    ranks = fault_runs.start(tmp_path, faults={1: [fault("batch", 3, "hold")]})
    wait_for_hold(tmp_path, ranks)
    assert [os.getsid(rank.pid) for rank in ranks] == [rank.pid for rank in ranks]
    assert all(len(rank.workers()) == 1 for rank in ranks)
    assert all(set(session_of(rank.pid)) >= {rank.pid, *rank.workers()} for rank in ranks)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    assert [rank.wait(timeout_s=PATIENCE_S) for rank in ranks] == [-9, -9]
    # Workers check every 5 s that their rank runs.
    wait_until(
        lambda: not any(session_of(rank.pid) for rank in ranks),
        else_say=lambda: "workers outlive their rank",
    )
