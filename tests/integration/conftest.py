"""Fixtures that several integration tests share."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import (
    FaultRuns,
    copy_run,
    fault,
    micro_step,
    wait_and_end_others,
)
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.waiting import ROOT


@pytest.fixture(scope="session")
def digits_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded corpus as shards, made by the scripts."""
    folder = tmp_path_factory.mktemp("digits")
    for command in (
        ["data_prep/make_corpus.py", "digits", folder / "images"],
        [
            "data_prep/make_shards.py",
            "--config",
            ROOT / "configs/data/digits.yaml",
            f"source.path={folder / 'images'}",
            f"output={folder / 'shards'}",
        ],
    ):
        script, *arguments = map(str, command)
        subprocess.run([sys.executable, ROOT / script, *arguments], check=True, cwd=folder)
    return folder / "shards"


@pytest.fixture(scope="session")
def fault_runs(
    warm_starter: WarmStarter, digits_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> FaultRuns:
    folder = tmp_path_factory.mktemp("faults")
    return FaultRuns(warm_starter, shards=digits_shards, folder=folder)


@pytest.fixture(scope="session")
def killed(fault_runs: FaultRuns) -> Path:
    """A training killed in step 17, with checkpoints of steps 10 and 15. Tests copy it."""
    place = fault_runs.folder / "killed"
    # Rank 1 waits 2 s before it dies, so that the save of step 15 is committed.
    ranks = fault_runs.start(place, faults={1: [fault("backward", micro_step(17), "lag and kill")]})
    assert wait_and_end_others(ranks)[1] == -signal.SIGKILL
    return place


@pytest.fixture
def killed_copy(killed: Path, tmp_path: Path) -> Path:
    return copy_run(killed, tmp_path)
