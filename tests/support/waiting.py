"""Run Python in tests, and wait for other processes and threads.

A shared machine may stall for half a minute, so these limits say nothing about speed: they
bound how long a failing test hangs. A test that something happens in time compares it with an event
that would happen later.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Below pytest's time limit, which would not say what the test waited for.
PATIENCE_S = 600.0


def wait_until(
    condition: Callable[[], object],
    *,
    else_say: Callable[[], object] = lambda: "the condition never became true",
    every_s: float = 0.005,
):
    """Return once the condition is true; `else_say` gives the message of the failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, else_say()
        time.sleep(every_s)


def run_python(*words: object, **options) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; what it prints is kept as text. options: of the process."""
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, words)], **options)


def stacks(pids: Sequence[int]) -> str:
    """What all threads of hung processes do, by py-spy."""
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    # With C++, where collectives wait; and with a limit, since a stopped process answers nobody.
    command = ["timeout", "20", py_spy, "dump", "--native", "--pid"]
    dumps = []
    for pid in pids:
        # Whatever comes out: the process may have ended, or py-spy may not be allowed.
        done = subprocess.run([*command, str(pid)], capture_output=True, text=True)
        dumps.append(done.stdout + done.stderr)
    return "\n".join(dumps)
