"""What a test needs of the machine: SLURM, strace, a mount, a compiled extension."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; with VITSCALE_REQUIRE_ALL=1, as before a merge, fail it."""
    if os.environ.get("VITSCALE_REQUIRE_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
