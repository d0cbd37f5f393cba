"""A rank that runs the node check once. The slow one computes on one core that others use too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitscale.distributed.node_check import check_nodes
from vitscale.distributed.world import process_group

SLOW_RANK = "1"
NUM_BURNERS = 4


@contextmanager
def slowed() -> Iterator[None]:
    """Share one core with processes of higher priority that only burn time."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BURNERS)
    ]
    os.nice(10)
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def check() -> None:
    os.environ["SLURMD_NODENAME"] = f"node{os.environ['RANK']}"
    with process_group(device="cpu", timeout_min=1, num_threads=1) as world:
        state = torch.get_rng_state()
        for line in check_nodes(world, seconds=2):
            print(line, flush=True)
        assert torch.equal(torch.get_rng_state(), state)


if os.environ["RANK"] == SLOW_RANK:
    with slowed():
        check()
else:
    check()
