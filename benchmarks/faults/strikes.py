"""What a kill storm does to a run: which process it strikes, when, and with what.

Owns: drawing a strike, waiting for its moment by watching the run folder, and carrying it out.
Leaves out: starting ranks (`warm_ranks`) and judging what came of it (`storm`).
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
LOOK_EVERY_S = 0.002
MOMENT_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One blow, drawn before it falls."""

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
    """When somebody ends the ranks that are left; None: they have to notice by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """A strike that fell."""

    pids: tuple[int, ...]
    killed: int
    """Processes that got SIGKILL; 0 for signals alone."""
    hit: str
    """In words."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One start of a run: its ranks and its folders."""

    ranks: list[WarmRank]
    folder: Path
    records: Path

    def ended(self) -> bool:
        """Whether any rank has."""
        return any(rank.poll() is not None for rank in self.ranks)

    def num_batches(self) -> int:
        """Micro-batches noted, over all lives."""
        return sum(path.read_bytes().count(b"\n") for path in self.records.glob("batches-*.jsonl"))

    def saves_begun(self) -> set[str]:
        """Temporary folders of saves at work or broken off."""
        checkpoints = self.folder / "checkpoints"
        if not checkpoints.is_dir():
            return set()
        return {name for name in os.listdir(checkpoints) if name.endswith(".tmp")}


def draw_strike(chance: random.Random, *, num_ranks: int, start_s: float, interval: int) -> Strike:
    """A strike as a function of the generator alone.

    start_s: how long a start takes. interval: micro-batches of all ranks between two saves.
    """
    moment = chance.choices(list(MOMENTS), weights=list(MOMENTS.values()))[0]
    victim = chance.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
    longest = {"start": start_s, "training": 0.05, "save": 0.03}[moment]
    counts = {"start": 0, "training": chance.randrange(3 * interval), "save": chance.randrange(3)}
    patience = round(chance.uniform(0, 3), 1)
    return Strike(
        moment=moment,
        victim=victim,
        count=counts[moment],
        delay_s=chance.uniform(0, longest),
        rank=chance.randrange(num_ranks),
        choice=chance.randrange(1 << 30),
        kill_after=chance.random() < 0.5,
        # Before the ranks have met, nobody but a launcher can know that one of them is gone.
        launcher_s=patience if moment == "start" or chance.random() < 0.7 else None,
    )


def await_moment(strike: Strike, life: Life) -> bool:
    """Wait for the strike's moment; False when the run was over first."""
    batches, passed = life.num_batches(), 0
    seen = life.saves_begun()
    deadline = time.monotonic() + MOMENT_WAIT_S
    while not _is_there(strike, life, batches=batches, passed=passed):
        if life.ended() or time.monotonic() > deadline:
            return False
        now = life.saves_begun()
        passed += len(now - seen)
        seen |= now
        time.sleep(LOOK_EVERY_S)
    time.sleep(strike.delay_s)
    return not life.ended()


def _is_there(strike: Strike, life: Life, *, batches: int, passed: int) -> bool:
    if strike.moment == "training":
        return life.num_batches() - batches > strike.count
    return strike.moment == "start" or passed > strike.count


def strike_down(strike: Strike, life: Life) -> Blow:
    """Carry out a strike now. A worker that is not there yet leaves its rank to be struck."""
    victim = life.ranks[strike.rank]
    if strike.victim == "all ranks":
        pids = tuple(rank.pid for rank in life.ranks)
        return Blow(pids=pids, killed=_kill(pids), hit="all ranks")
    if strike.victim == "worker" and (workers := victim.workers()):
        pids = (workers[strike.choice % len(workers)],)
        return Blow(pids=pids, killed=_kill(pids), hit=f"a worker of rank {strike.rank}")
    if strike.victim == "signals":
        words = _burst(strike, life)
        pids = (victim.pid,) if strike.kill_after else ()
        if pids:
            words += f", then rank {strike.rank}"
        return Blow(pids=pids, killed=_kill(pids), hit=words)
    return Blow(pids=(victim.pid,), killed=_kill((victim.pid,)), hit=f"rank {strike.rank}")


def _kill(pids: tuple[int, ...]) -> int:
    killed = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            continue
    return killed


def _burst(strike: Strike, life: Life) -> str:
    """Two to six stop signals in some milliseconds, to one rank or to any."""
    chance = random.Random(strike.choice)
    sent = []
    for _ in range(chance.randrange(2, 7)):
        number = chance.choice(SIGNALS)
        rank = chance.choice([strike.rank, chance.randrange(len(life.ranks))])
        life.ranks[rank].send_signal(number)
        sent.append(f"{number.name} to rank {rank}")
        time.sleep(chance.uniform(0, 0.01))
    return ", ".join(sent)
