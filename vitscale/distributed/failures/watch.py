"""What the heartbeat thread of a rank reads once a period: rank 0 the heartbeats of all ranks,
the others what rank 0 says.

Leaves out: what heartbeats mean (`heartbeat_table`), and what follows (`heartbeat`).
"""

from __future__ import annotations

import time

from vitscale.config.errors import FailureKind
from vitscale.distributed.failures.events import Failure
from vitscale.distributed.failures.heartbeat_table import (
    ENDED,
    Beat,
    HeartbeatTable,
    Silence,
    failure_from_json,
    failure_to_json,
)
from vitscale.distributed.world import World

WATCH, BEATS = "vitscale/watch", "vitscale/beats"


def beat_key(rank: int) -> str:
    """Where the store has the newest heartbeat of a rank."""
    return f"{BEATS}/{rank}"


class FirstRankWatch:
    """Rank 0 reads all heartbeats in one request, and says what it has found."""

    def __init__(self, world: World, *, period_s: float, dead_s: float, late_s: float) -> None:
        assert world.store is not None
        self._store, size = world.store, world.world_size
        self._keys = [beat_key(rank) for rank in range(size)]
        self._table = HeartbeatTable(size, period_s=period_s, dead_s=dead_s, late_s=late_s)
        self._num_looks = 0
        self.all_ended = False
        """Whether all ranks have come to their planned end."""

    def look(self) -> Failure | None:
        """What ends the run. Raises RuntimeError if the store is gone."""
        found = None
        if self._store.check(self._keys):
            beats = [Beat.parse(each.decode()) for each in self._store.multi_get(self._keys)]
            found = self._table.problem(beats, now=time.monotonic())
            self.all_ended = all(beat.state == ENDED for beat in beats)
        self._num_looks += 1
        said = ENDED if self.all_ended else str(self._num_looks)
        self._store.set(WATCH, failure_to_json(found) if found else said)
        return found


class OtherRankWatch:
    """The other ranks read what rank 0 has found, or that it is alive."""

    def __init__(self, world: World, *, period_s: float, dead_s: float, late_s: float) -> None:
        assert world.store is not None
        self._store, self._rank, self._dead_s = world.store, world.rank, dead_s
        self._silence = Silence(period_s)
        self.all_ended = False

    def look(self) -> Failure | None:
        """What ends the run. Raises RuntimeError if the store is gone."""
        if not self._store.check([WATCH]):
            return None
        said = self._store.get(WATCH).decode()
        if said.startswith("{"):
            return failure_from_json(said)
        self.all_ended = said == ENDED
        if self.all_ended or self._is_alive(int(said)):
            return None
        node = Beat.parse(self._store.get(beat_key(0)).decode()).node
        return Failure(
            kind=FailureKind.KILLED,
            what=f"rank 0 on {node} has sent no heartbeat for {self._dead_s:.0f} s",
            rank=0,
            node=node,
            reported_by=self._rank,
        )

    def _is_alive(self, num_looks: int) -> bool:
        return self._silence.seconds(num_looks, now=time.monotonic()) <= self._dead_s
