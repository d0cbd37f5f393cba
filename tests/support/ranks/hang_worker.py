"""Run one rank of a loop of collectives with a fault in step 5. No DeepSpeed.

Started by test_hung_ranks.py: `hang_worker.py CASE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from vitscale.checkpoint import commit
from vitscale.checkpoint.store import CheckpointStore
from vitscale.distributed.failures.ending import run_rank_script
from vitscale.distributed.failures.heartbeat import Heartbeat
from vitscale.distributed.preemption import PreemptionFlag
from vitscale.distributed.world import World, process_group, sum_over_ranks

TIMEOUT_MIN, INIT_TIMEOUT_MIN = 0.2, 0.1
# case: (rank, signal it gets in step 5)
SIGNALS = {"rank 1 stopped": (1, signal.SIGSTOP), "rank 0 stopped": (0, signal.SIGSTOP)}
SIGNALS["rank 1 killed"] = (1, signal.SIGKILL)


class Unfinished:
    """Work that a device does not finish."""

    def query(self) -> bool:
        return False


def inject_fault(case: str, rank: int, heartbeat: Heartbeat) -> None:
    if case in SIGNALS and SIGNALS[case][0] == rank:
        os.kill(os.getpid(), SIGNALS[case][1])
    if case == "rank 1 slow" and rank == 1:
        time.sleep(600)
    if case == "device of rank 1 hangs":
        # Until it waits for its device, rank 1 has as many marks as rank 0.
        if rank == 1:
            heartbeat._marks.record = Unfinished
        heartbeat.mark("training")
        time.sleep(600 * rank)
    if case == "all stopped for a while":
        Path(f"paused-{rank}").touch()
        while not Path("go on").exists():
            time.sleep(0.01)
    if case == "signal to rank 1" and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def save_on_a_disk_that_hangs(world: World, heartbeat: Heartbeat) -> None:
    """All main threads wait for their last save, with the same heartbeat mark."""
    if world.rank == 1:
        commit.write_new_file = lambda *_: time.sleep(600)  # type: ignore[assignment]  # the fault
    with CheckpointStore(Path("run"), keep=1, world=world, heartbeat=heartbeat) as store:
        store.save({"a": torch.ones(3)}, step=5, progress={}, description={})


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
        Heartbeat(world, timeout_min=TIMEOUT_MIN) as heartbeat,
        PreemptionFlag(world) as stop,
        heartbeat.reporting(),
    ):
        for step in range(20):
            heartbeat.mark("waiting for data")
            if step == 5:
                inject_fault(case, world.rank, heartbeat)
                if case == "disk of rank 1 hangs":
                    save_on_a_disk_that_hangs(world, heartbeat)
            heartbeat.mark("training")
            sum_over_ranks(torch.ones(3))
            if stop.set_on_any_rank():
                print(f"stopped at step {step}", flush=True)
                break
        if case == "signal to rank 1" and world.rank == 1 and world.store is not None:
            time.sleep(3)  # rank 0, which is done, must go on serving the store
            world.store.check(["a"])


if __name__ == "__main__":
    run_rank_script(main)
