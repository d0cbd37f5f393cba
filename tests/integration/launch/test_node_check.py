"""The node check on two real ranks, one of which has to share its core."""

from __future__ import annotations

import pytest

from tests.support.ranks.rank_processes import ROOT, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_a_slow_rank_is_named_and_the_run_continues(tmp_path) -> None:
    worker = ROOT / "tests/support/ranks/node_check_worker.py"
    ended = run_ranks([worker], num_ranks=2, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    for code, output in ended:
        assert code == 0, output
        assert "node check of 2 s, 2 ranks on 2 node(s): matrix product" in output
        assert "warning: rank 1 on node1 is slow: matrix product" in output
        assert "rank 0 on node0 is slow" not in output
        assert "launch.exclude=node1\n" in output
