"""A process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.array_subject import one_rank
from vitscale.distributed.world import World, process_group


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with process_group(device="cpu", timeout_min=1, num_threads=1) as joined:
        yield joined
