"""Wait in tests for other processes and threads.

A shared machine may stall for half a minute, so these limits say nothing about speed: they
bound how long a failing test hangs. A test that something happens in time compares it with an event
that would happen later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Below pytest's time limit, which would not say what the test waited for.
PATIENCE_S = 600.0


def wait_until(
    condition: Callable[[], object],
    *,
    else_say: Callable[[], object] = lambda: "the condition never became true",
    every_s: float = 0.005,
) -> None:
    """Return once the condition is true; `else_say` gives the message of the failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, else_say()
        time.sleep(every_s)
