"""One rank, and checkpoints that a store on it has saved."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vitscale.distributed.world import World, process_group


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with process_group(device="cpu", timeout_min=1, num_threads=1) as joined:
        yield joined
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
