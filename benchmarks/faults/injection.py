"""Inject faults into a training run: draw a fault, wait for its moment, carry it out.

Leaves out: starting ranks (`warm_ranks`) and checking the result (`kill_storm`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks.warm_ranks import WarmRank

# Out of 100.
MOMENTS = {"start": 12, "training": 43, "save": 45}
VICTIMS = {"rank": 45, "worker": 25, "all ranks": 15, "signals": 15}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
POLL_INTERVAL_S = 0.002
MOMENT_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """A fault, drawn before it is injected."""

    moment: str
    victim: str
    count: int
    """Of micro-batches (training) or saves (save) to let pass first."""
    delay_s: float
    rank: int
    choice: int
    """Which worker, or the seed of a burst of signals."""
    kill_after: bool
    """After a burst of signals: kill the rank, too."""
    launcher_s: float | None
    """When a launcher ends the remaining ranks; None: they must detect the fault themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A fault that was carried out."""

    pids: tuple[int, ...]
    killed: int
    """Processes that got SIGKILL; 0 for signals alone."""
    hit: str
    """Which processes it hit, in words."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run: its ranks and its folders."""

    ranks: list[WarmRank]
    folder: Path
    records: Path

    def ended(self) -> bool:
        """Whether any rank has exited."""
        return any(rank.poll() is not None for rank in self.ranks)

    def num_batches(self) -> int:
        """Micro-batches recorded, over all attempts."""
        return sum(path.read_bytes().count(b"\n") for path in self.records.glob("batches-*.jsonl"))

    def saves_begun(self) -> set[str]:
        """Temporary folders of running or interrupted saves."""
        checkpoints = self.folder / "checkpoints"
        if not checkpoints.is_dir():
            return set()
        return {name for name in os.listdir(checkpoints) if name.endswith(".tmp")}


def draw_fault(
    rng: random.Random, *, num_ranks: int, start_s: float, interval: int
) -> PlannedFault:
    """A fault as a function of the generator alone.

    start_s: how long a start takes. interval: micro-batches of all ranks between two saves.
    """
    moment = rng.choices(list(MOMENTS), weights=list(MOMENTS.values()))[0]
    victim = rng.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
    longest = {"start": start_s, "training": 0.05, "save": 0.03}[moment]
    counts = {"start": 0, "training": rng.randrange(3 * interval), "save": rng.randrange(3)}
    patience = round(rng.uniform(0, 3), 1)
    return PlannedFault(
        moment=moment,
        victim=victim,
        count=counts[moment],
        delay_s=rng.uniform(0, longest),
        rank=rng.randrange(num_ranks),
        choice=rng.randrange(1 << 30),
        kill_after=rng.random() < 0.5,
        # Before the rendezvous, only a launcher can know that a rank is gone.
        launcher_s=patience if moment == "start" or rng.random() < 0.7 else None,
    )


def await_moment(fault: PlannedFault, attempt: Attempt) -> bool:
    """Wait for the fault's moment; False when the run was over first."""
    batches, passed = attempt.num_batches(), 0
    seen = attempt.saves_begun()
    deadline = time.monotonic() + MOMENT_WAIT_S
    while not _is_due(fault, attempt, batches=batches, passed=passed):
        if attempt.ended() or time.monotonic() > deadline:
            return False
        now = attempt.saves_begun()
        passed += len(now - seen)
        seen |= now
        time.sleep(POLL_INTERVAL_S)
    time.sleep(fault.delay_s)
    return not attempt.ended()


def _is_due(fault: PlannedFault, attempt: Attempt, *, batches: int, passed: int) -> bool:
    if fault.moment == "training":
        return attempt.num_batches() - batches > fault.count
    return fault.moment == "start" or passed > fault.count


def inject(fault: PlannedFault, attempt: Attempt) -> InjectedFault:
    """Carry out a fault now. Without a worker yet, its rank is hit instead."""
    victim = attempt.ranks[fault.rank]
    if fault.victim == "all ranks":
        pids = tuple(rank.pid for rank in attempt.ranks)
        return InjectedFault(pids=pids, killed=_kill(pids), hit="all ranks")
    if fault.victim == "worker" and (workers := victim.workers()):
        pids = (workers[fault.choice % len(workers)],)
        return InjectedFault(pids=pids, killed=_kill(pids), hit=f"a worker of rank {fault.rank}")
    if fault.victim == "signals":
        words = _burst(fault, attempt)
        pids = (victim.pid,) if fault.kill_after else ()
        if pids:
            words += f", then rank {fault.rank}"
        return InjectedFault(pids=pids, killed=_kill(pids), hit=words)
    return InjectedFault(pids=(victim.pid,), killed=_kill((victim.pid,)), hit=f"rank {fault.rank}")


def _kill(pids: tuple[int, ...]) -> int:
    killed = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            continue
    return killed


def _burst(fault: PlannedFault, attempt: Attempt) -> str:
    """Two to six stop signals in some milliseconds, to one rank or to any."""
    rng = random.Random(fault.choice)
    sent = []
    for _ in range(rng.randrange(2, 7)):
        number = rng.choice(SIGNALS)
        rank = rng.choice([fault.rank, rng.randrange(len(attempt.ranks))])
        attempt.ranks[rank].send_signal(number)
        sent.append(f"{number.name} to rank {rank}")
        time.sleep(rng.uniform(0, 0.01))
    return ", ".join(sent)
