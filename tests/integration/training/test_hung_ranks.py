"""The other ranks name a stopped, killed, slow or missing rank in bounded time.

All cases run concurrently, since starting and waiting take most of the time.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.levels import by_level
from tests.support.ranks.hang_worker import TIMEOUT_MIN
from tests.support.ranks.rank_processes import ROOT, start_ranks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests/support/ranks/hang_worker.py"
HERE = socket.gethostname()
PAUSED, SIGNAL = "all stopped for a while", "signal to rank 1"
# case: (surviving rank, its exit code, a part of its output)
CASES = {
    "rank 1 stopped": (0, 1, f"rank 1 on {HERE} has sent no heartbeat for 8 s"),
    "rank 0 stopped": (
        1,
        1,
        f"rank 0 on {HERE} was stopped or killed, or its node is gone: its key",
    ),
    "rank 1 slow": (0, 1, f"rank 1 on {HERE} has kept the others waiting for"),
    "device of rank 1 hangs": (0, 1, f"rank 1 on {HERE} has kept the others waiting for"),
    "rank 1 killed": (0, 1, f"rank 1 on {HERE} was killed or exited: its process is gone"),
    "disk of rank 1 hangs": (0, 74, f"rank 1 on {HERE} ended the run: save step 5: "),
    "rank 1 missing": (0, 1, "not all of 2 ranks started within 0.1 min; missing: 1"),
    "rank 0 missing": (1, 1, "rank 0 does not answer at 127.0.0.1:"),
    "nothing": (1, 0, ""),
    PAUSED: (0, 0, ""),
    SIGNAL: (0, 0, "stopped at step"),
}
FAST = {"rank 1 stopped", "rank 1 missing", SIGNAL}
Ends = dict[str, tuple[int | None, str]]


def stop_for_a_while(processes: list[subprocess.Popen[str]], folder: Path) -> None:
    """Like a suspended job or machine; for longer than the limit of a missing heartbeat."""

    def are_paused() -> bool:
        assert all(process.poll() is None for process in processes), "ended too early"
        return len(list(folder.glob("paused-*"))) == 2

    wait_until(are_paused)
    first, second = processes
    # In this order the first rank sees no new heartbeat of the second, before and after.
    second.send_signal(signal.SIGSTOP)
    time.sleep(2)
    first.send_signal(signal.SIGSTOP)
    time.sleep(TIMEOUT_MIN * 60)
    first.send_signal(signal.SIGCONT)
    time.sleep(2)
    second.send_signal(signal.SIGCONT)
    (folder / "go on").touch()


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Exit code and output of the surviving rank, for every case that is run."""
    names = {item.name for item in request.session.items}
    cases = [case for case in CASES if any(f"[{case}]" in name for name in names)]
    folder = tmp_path_factory.mktemp("hung")
    started: dict[str, list[subprocess.Popen[str]]] = {}
    found: Ends = {}
    try:
        for case in cases:
            started[case] = start_ranks([WORKER, case], num_ranks=2, cwd=Path(folder))
            if case == "rank 0 missing":
                started[case][0].kill()
        if PAUSED in cases:
            stop_for_a_while(started[PAUSED], Path(folder))
        for case in cases:
            living = CASES[case][0]
            output, _ = started[case][living].communicate(timeout=300)
            if case == SIGNAL:
                output += started[case][1].communicate(timeout=300)[0]
            found[case] = (started[case][living].returncode, output)
    finally:
        for process in [each for pair in started.values() for each in pair]:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    return found


@pytest.mark.parametrize("case", by_level(CASES, fast=FAST, slow=CASES.keys() - FAST))
def test_surviving_rank_names_the_hung_rank_and_ends(ends: Ends, case: str) -> None:
    _, code, text = CASES[case]
    assert ends[case][0] == code, ends[case][1]
    assert text in ends[case][1]
    if case == SIGNAL:
        # Sent in step 5; these steps are so short that not every one is one to ask at.
        first, second = re.findall(r"stopped at step (\d+)", ends[case][1])
        assert first == second and int(first) > 5
        assert "is gone" not in ends[case][1] and "Error" not in ends[case][1]
    if "missing" in case:
        assert "Traceback" not in ends[case][1]
