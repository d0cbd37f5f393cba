"""Waiting in tests for what other processes and threads do.

A host may take its processors away from a machine for half a minute. So a limit here is no claim
about speed: it only bounds how long a test hangs that will fail. What must happen in time is tested
against what would happen later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Below the time limit of a test, which would not say what was waited for.
PATIENCE_S = 600.0


def wait_until(
    condition: Callable[[], object],
    *,
    else_say: Callable[[], object] = lambda: "it never came",
    every_s: float = 0.005,
) -> None:
    """Return once the condition is true; `else_say` tells what was there instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, else_say()
        time.sleep(every_s)
