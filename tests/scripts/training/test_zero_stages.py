"""Every ZeRO stage equals a plain torch loop; state moves between stages; bf16; bad updates."""

from __future__ import annotations

import pytest

from tests.support.engine.zero_checks import CHECKS
from tests.support.ranks.fault_runs import wait_all
from tests.support.ranks.warm_ranks import ROOT, WarmStarter

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def printed(warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of two ranks that ran all checks."""
    worker = [ROOT / "tests/support/engine/zero_checks.py"]
    ranks = warm_starter.start(worker, num_ranks=2, folder=tmp_path_factory.mktemp("zero"))
    wait_all(ranks)
    return [rank.output() for rank in ranks]


@pytest.mark.parametrize("check", CHECKS)
def test_engine(printed: list[str], check: str) -> None:
    assert all(f"passed: {check}\n" in each for each in printed), "\n".join(printed)
    assert not any("deprecated" in each for each in printed)
