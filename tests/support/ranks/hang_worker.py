"""Run one rank of a loop of collectives with a fault in step 5. No DeepSpeed.

Started by test_hung_ranks.py: `hang_worker.py CASE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from vitscale.distributed.exit import run_rank_script
from vitscale.distributed.preemption import PreemptionFlag
from vitscale.distributed.watchdog import Watchdog
from vitscale.distributed.world import process_group, sum_over_ranks

TIMEOUT_MIN, INIT_TIMEOUT_MIN = 0.2, 0.1


def inject_fault(case: str) -> None:
    """In rank 1."""
    if case == "rank 1 stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "rank 1 slow":
        time.sleep(600)
    if case == "signal to rank 1":
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    case = sys.argv[1]
    if case == "rank 1 missing" and os.environ["RANK"] == "1":
        return
    with (
        process_group(
            device="cpu",
            timeout_min=TIMEOUT_MIN,
            num_threads=1,
            init_timeout_min=INIT_TIMEOUT_MIN if "missing" in case else 2.0,
        ) as world,
        Watchdog(world, timeout_min=TIMEOUT_MIN) as watchdog,
        PreemptionFlag() as stop,
        watchdog.reporting(),
    ):
        for step in range(20):
            watchdog.mark("waiting for data")
            if step == 5 and world.rank == 1:
                inject_fault(case)
            watchdog.mark("training")
            sum_over_ranks(torch.ones(3))
            if stop.set_on_any_rank():
                print(f"stopped at step {step}", flush=True)
                break
        if case == "signal to rank 1" and world.rank == 1 and world.store is not None:
            time.sleep(3)  # rank 0, which is done, must go on serving the store
            world.store.check(["a"])


if __name__ == "__main__":
    run_rank_script(main)
