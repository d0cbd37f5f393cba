"""Detect unhealthy training: skipped updates, unreadable samples.

Leaves out: measuring (`interval_log`) and skipping updates (`engine.guard`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from vitscale.config.errors import DivergedError, UserError
from vitscale.data.index import sample_names
from vitscale.data.samples import Unreadable
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import gather_objects
from vitscale.engine.guard import Health
from vitscale.runs.training import TrainingPlan

UNREADABLE_SHOWN = 10
# A run ends after this many updates in a row whose loss or gradient was not finite, and when more
# than this many of 100 updates were such, or a tenth of a log interval that is longer.
MAX_SKIPPED = 10
WINDOW = 100
NAMES_SHOWN = 8


class SkippedUpdateMonitor:
    """Report updates that the guard skipped, and end a run that skips too many."""

    def __init__(
        self, *, data: TrainingSet, plan: TrainingPlan, start_step: int, num_skipped: int
    ) -> None:
        """num_skipped: updates skipped before `start_step`."""
        self._data, self._plan = data, plan
        # (step, updates skipped by then) of log lines; between the first and the last lie at least
        # `WINDOW` updates, as soon as there were so many.
        self._marks = deque([(start_step, num_skipped)])

    def update(
        self, health: Health, *, step: int, loss_scale: float | None, say: Callable[[str], None]
    ) -> None:
        """Name the samples of the last skipped update, if there are new ones. Collective.

        loss_scale: of fp16, None otherwise. Raises DivergedError after too many in a row or too
        large a share, except while fp16 still searches its scale by overflowing.
        """
        num_new = health.skipped - self._marks[-1][1]
        self._marks.append((step, health.skipped))
        while step - self._marks[1][0] >= WINDOW:
            self._marks.popleft()
        if not num_new or health.last_step is None:
            return
        found = enumerate(gather_objects(health.bad_micro_step))
        ranks = {rank: number for rank, number in found if number is not None}
        what = f"{'the loss' if ranks else 'the gradient'} was not finite"
        if ranks:
            what += f" on rank {', '.join(map(str, ranks))}"
        positions = positions_of_step(self._plan, step=health.last_step, micro_steps=ranks)
        names, last = names_at(self._data, positions), f"the last at step {health.last_step}"
        total = f"{num_new} updates skipped, {health.skipped} since the start"
        say(f"{total}, {last}: {what}; samples {names}")
        length, num_skipped = step - self._marks[0][0], health.skipped - self._marks[0][1]
        many = ""
        if health.longest >= MAX_SKIPPED:
            many = f"{health.longest} updates in a row"
        elif num_skipped > MAX_SKIPPED * max(length / WINDOW, 1):
            many = f"{num_skipped} of the last {length} updates"
        if many and not (loss_scale is not None and loss_scale > 1):
            raise DivergedError(
                f"{many} were skipped, {last}: {what}\n    samples of that step: {names}",
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set "
                "optim.clip_norm=1; all checkpoints hold finite weights",
            )


class UnreadableSampleMonitor:
    """Report samples that were replaced because they could not be read."""

    def __init__(self, *, data: TrainingSet, max_fraction: float) -> None:
        """max_fraction: `data.max_unreadable_fraction`."""
        self._data, self._max_fraction = data, max_fraction
        self._pending: list[Unreadable] = []
        self.num_replaced = 0
        """On all ranks, in this process's lifetime, as of the last `report`."""

    def add(self, unreadable: Iterable[Unreadable]) -> None:
        """Samples that were replaced on this rank."""
        self._pending.extend(unreadable)

    def report(
        self, step: int, *, num_seen: int, num_samples: int, say: Callable[[str], None]
    ) -> None:
        """Name the samples that were replaced on any rank since the last call, at most
        `UNREADABLE_SHOWN` of them. Collective.

        num_seen: samples seen in this process's lifetime; num_samples: those of one epoch.
        Raises UserError when too many of the larger number were replaced.
        """
        own, self._pending = self._pending, []
        shown = own[:UNREADABLE_SHOWN]
        names = [repr(each.key) for each in shown]
        if self._data.order is not None:
            names = sample_names(self._data.parts, [(each.part, each.sample) for each in shown])
        found = gather_objects((len(own), list(zip(names, shown, strict=True))))
        num_new = sum(count for count, _ in found)
        if not num_new:
            return
        self.num_replaced += num_new
        lost = [each for _, named in found for each in named][:UNREADABLE_SHOWN]
        for name, each in lost:
            say(f"{each.shard}: sample {name} was replaced: {each.error}")
        unnamed = num_new - len(lost)
        more = f"; {unnamed} of the last {num_new} are not named here" if unnamed else ""
        say(f"step {step}: {self.num_replaced} samples replaced since the start{more}")
        if self.num_replaced > self._max_fraction * max(num_seen, num_samples):
            raise UserError(
                f"{self.num_replaced} samples could not be read, more than "
                f"data.max_unreadable_fraction={self._max_fraction:g} allows; the last: {name}",
                where=each.shard,
                next_step="find every damaged shard with vitscale prepare verify and copy it again",
            )


def positions_of_step(plan: TrainingPlan, *, step: int, micro_steps: dict[int, int]) -> list[int]:
    """Positions in training of one micro-batch of some ranks, or of all when none is given.

    step: counted from 1. micro_steps: rank -> micro-step.
    """
    start, share = (step - 1) * plan.global_batch, plan.micro_batch
    firsts = [start + (n * plan.world_size + rank) * share for rank, n in micro_steps.items()]
    found = [position for first in firsts for position in range(first, first + share)]
    return found or list(range(start, start + plan.global_batch))


def names_at(data: TrainingSet, positions: Iterable[int]) -> str:
    """Keys of the samples at these positions, at most `NAMES_SHOWN`."""
    if data.order is None:
        return "that are not known: streamed tars have no positions"
    draws = [data.order.at(position) for position in positions]
    shown = sample_names(data.parts, [(draw.part, draw.sample) for draw in draws[:NAMES_SHOWN]])
    more = f" and {len(draws) - NAMES_SHOWN} more" if len(draws) > NAMES_SHOWN else ""
    return ", ".join(shown) + more
