"""The other rank names a stopped, slow or missing rank in bounded time.

All cases run concurrently, since starting and waiting take most of the time.
"""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT, start_ranks

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests/support/ranks/hang_worker.py"
HERE = socket.gethostname()
SIGNAL = "signal to rank 1"
# case: (exit code of rank 0, a part of its output)
CASES = {
    "rank 1 stopped": (1, f"rank 1 on {HERE} has sent no heartbeat for 8 s"),
    "rank 1 slow": (1, f"rank 1 on {HERE} has kept the others waiting for"),
    "rank 1 missing": (1, "not all of 2 ranks started within 0.1 min; missing: 1"),
    SIGNAL: (0, "stopped at step"),
}
Ends = dict[str, tuple[int | None, str]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Exit code and output of rank 0, by case."""
    folder = tmp_path_factory.mktemp("hung")
    started: dict[str, list[subprocess.Popen[str]]] = {}
    found: Ends = {}
    try:
        for case in CASES:
            started[case] = start_ranks([WORKER, case], num_ranks=2, cwd=Path(folder))
        for case in CASES:
            output, _ = started[case][0].communicate(timeout=300)
            if case == SIGNAL:
                output += started[case][1].communicate(timeout=300)[0]
            found[case] = (started[case][0].returncode, output)
    finally:
        for process in [each for pair in started.values() for each in pair]:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_surviving_rank_names_the_hung_rank_and_ends(ends: Ends, case: str) -> None:
    code, text = CASES[case]
    assert ends[case][0] == code, ends[case][1]
    assert text in ends[case][1]
    if case == SIGNAL:
        # Sent in step 5; these steps are so short that not every one is one to ask at.
        first, second = re.findall(r"stopped at step (\d+)", ends[case][1])
        assert first == second and int(first) > 5
        assert "is gone" not in ends[case][1] and "Error" not in ends[case][1]
    if "missing" in case:
        assert "Traceback" not in ends[case][1]
