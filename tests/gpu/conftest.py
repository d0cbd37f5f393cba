"""What only a GPU shows. `pytest tests/gpu` takes three minutes and one NVIDIA GPU of 12 GiB.

Elsewhere these tests are skipped, also under VITSCALE_REQUIRE_ALL=1: the machine that decides about
a merge has no GPU.
"""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from benchmarks.training_loops import start_afresh
from vitscale.distributed.world import World, process_group


# As a fixture: a mark would ask for the GPU while tests are collected.
@pytest.fixture(scope="session")
def device() -> str:
    # To rehearse on a CPU those tests that call nothing of CUDA: PYTEST_GPU_DEVICE=cpu.
    rehearsed_on = os.environ.get("PYTEST_GPU_DEVICE")
    if rehearsed_on:
        return rehearsed_on
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"


@pytest.fixture
# Joining sets variables, which the next one would take for a launcher's.
def world(device) -> Iterator[World]:
    with (
        mock.patch.dict(os.environ),
        process_group(
            device=device,
            timeout_min=5,
            num_threads=1,
        ) as joined,
    ):
        # What an earlier test has left on the device would count as memory of this one.
        start_afresh(joined.device)
        yield joined
