"""Find dead, hung and slow ranks in the heartbeats of all ranks.

Owns: what a heartbeat says, how long a rank counts as silent, and the sentence that names ranks.
Leaves out: sending heartbeats and ending processes (`heartbeat`). Needs no torch.

Silence is the sum of the times between checks, each counted as two periods at most: after a whole
job was suspended (by its machine or SLURM), its ranks do not count as silent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from vitscale.config.errors import FailureKind
from vitscale.distributed.failures.events import Failure

# How a rank is: it lost a peer in a collective; it ended as planned; it reports a failure, of its
# own or of another rank, as JSON in `doing`.
RUNNING, LOST, ENDED, REPORTS = "running", "lost", "ended", "reports"
# A rank is asked for once a period; a thread may be late by one.
PERIODS_OF_SILENCE = 2.5
MOST_NODES, MOST_RANKS = 4, 16


class Beat(NamedTuple):
    """One heartbeat of one rank."""

    number: int
    """Of heartbeats that the rank has sent."""
    reached: int
    """The last mark that the rank has reached: its loop, and its device, too."""
    collectives: int
    """That the rank has begun; fewer, if the others wait for it between two marks."""
    state: str
    node: str
    doing: str
    """Since the mark that it has reached."""

    def text(self) -> str:
        return "\t".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Beat:
        number, reached, collectives, state, node, doing = text.split("\t", 5)
        return cls(int(number), int(reached), int(collectives), state, node, doing)

    @property
    def progress(self) -> tuple[int, int]:
        return self.reached, self.collectives


def failure_to_json(failure: Failure) -> str:
    return json.dumps({k: v for k, v in asdict(failure).items() if v is not None})


def failure_from_json(text: str) -> Failure:
    values = json.loads(text)
    return Failure(**values | {"kind": FailureKind(values["kind"])})


class Silence:
    """How long a number that should grow has been constant, checked about once a period."""

    def __init__(self, period_s: float) -> None:
        self.longest_s, self.number, self.checked, self.silent_s = 2 * period_s, -1, 0.0, 0.0

    def seconds(self, number: int, *, now: float) -> float:
        self.silent_s += min(now - self.checked, self.longest_s)
        if number != self.number:
            self.silent_s = 0.0
        self.number, self.checked = number, now
        return self.silent_s


class HeartbeatTable:
    """The heartbeats of all ranks, as rank 0 reads them once a period."""

    def __init__(self, num_ranks: int, *, period_s: float, dead_s: float, late_s: float) -> None:
        """dead_s: without a heartbeat; late_s: without progress while others have made some."""
        self._lost_s, self._dead_s, self._late_s = PERIODS_OF_SILENCE * period_s, dead_s, late_s
        self._of_rank = [Silence(period_s) for _ in range(num_ranks)]
        self._of_loop = [Silence(period_s) for _ in range(num_ranks)]

    def problem(self, beats: Sequence[Beat], *, now: float) -> Failure | None:
        """What ends the run; None if nothing does. beats: of every rank, in order."""
        pairs = list(zip(self._of_rank, beats, strict=True))
        silent_s = [of_rank.seconds(beat.number, now=now) for of_rank, beat in pairs]
        loops = zip(self._of_loop, beats, strict=True)
        waited_s = [of_loop.seconds(sum(beat.progress), now=now) for of_loop, beat in loops]
        for beat in beats:
            if beat.state == REPORTS:
                return failure_from_json(beat.doing)
        present = [r for r, beat in enumerate(beats) if beat.state != ENDED]
        if dead := [rank for rank in present if silent_s[rank] > self._dead_s]:
            return _failure(
                beats,
                dead,
                FailureKind.KILLED,
                f"has sent no heartbeat for {self._dead_s:.0f} s: it was stopped or killed, or its "
                "node is gone",
            )
        if any(beats[rank].state == LOST for rank in present):
            gone = [r for r in range(len(beats)) if r not in present or silent_s[r] > self._lost_s]
            if gone:
                return _failure(beats, gone, FailureKind.KILLED, "sends no heartbeat any more")
        if any(waited_s[rank] >= self._late_s for rank in present):
            return self._late(beats, present)
        return None

    def _late(self, beats: Sequence[Beat], present: Sequence[int]) -> Failure | None:
        """The ranks that the others wait for; None when all have reached the same."""
        least = min(beats[rank].progress for rank in present)
        late = [rank for rank in present if beats[rank].progress == least]
        # All in the same collective, or none in any. Collectives have timeouts.
        if len(late) == len(beats):
            return None
        doing = ", ".join(sorted({beats[rank].doing for rank in late}))
        what = f"has kept the others waiting for {self._late_s:.0f} s ({doing})"
        return _failure(beats, late, FailureKind.HANG, what)


def _failure(beats: Sequence[Beat], ranks: Sequence[int], kind: FailureKind, what: str) -> Failure:
    """The failure of the first of these ranks, in a sentence that names all."""
    first = ranks[0]
    return Failure(
        kind=kind, what=f"{names(beats, ranks)} {what}", rank=first, node=beats[first].node
    )


def names(beats: Sequence[Beat], ranks: Iterable[int]) -> str:
    """Ranks by node, such as `rank 3 on n1, all of n2 (rank 8 to 15)`."""
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_node[beats[rank].node].append(rank)
    texts = []
    for node, found in list(by_node.items())[:MOST_NODES]:
        more = f" and {len(found) - MOST_RANKS} more" if len(found) > MOST_RANKS else ""
        listed = ", ".join(map(str, found[:MOST_RANKS]))
        is_whole = len(found) == sum(beat.node == node for beat in beats) > 1
        in_a_row = found[-1] - found[0] == len(found) - 1
        if is_whole and in_a_row:
            texts.append(f"all of {node} (rank {found[0]} to {found[-1]})")
        else:
            texts.append(f"rank {listed}{more} on {node}")
    rest = len(by_node) - MOST_NODES
    return ", ".join(texts) + (f" and ranks on {rest} more nodes" if rest > 0 else "")
