"""Reports of unreadable samples and skipped updates, and when they end a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vitscale.config.errors import UserError
from vitscale.data.order import rank_batches
from vitscale.data.workers import Unreadable
from vitscale.engine.guard import Health
from vitscale.runs.training import TrainingPlan
from vitscale.training import detectors
from vitscale.training.detectors import (
    UNREADABLE_SHOWN,
    SkippedUpdateMonitor,
    UnreadableSampleMonitor,
    positions_of_step,
)

PLAN = TrainingPlan(
    world_size=2,
    global_batch=8,
    micro_batch=2,
    accumulation=2,
    num_samples=1000,
    total_steps=100,
    warmup_steps=0,
    cooldown_steps=0,
)


@pytest.fixture(autouse=True)
def key_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of samples without an index."""
    monkeypatch.setattr(detectors, "sample_names", lambda parts, samples: names_of(samples))


def names_of(samples: list[tuple[int, int]]) -> list[str]:
    return [f"'key {sample} of {part}'" for part, sample in samples]


def lost(*samples: int, part: int = 0) -> list[Unreadable]:
    return [Unreadable(part, sample, f"{sample}.tar", "broken") for sample in samples]


class Ranks:
    """Rank 0 among ranks that lost `others` since the last log line."""

    def __init__(self, *, max_fraction: float = 0.1) -> None:
        self.others: list[list[Unreadable]] = []
        self.num_sent = 0
        data: Any = SimpleNamespace(parts=(), order=object())
        self.monitor = UnreadableSampleMonitor(
            data=data, max_fraction=max_fraction, gather=self._gather, total=self._total
        )

    def _total(self, own: int) -> int:
        return own + sum(map(len, self.others))

    def _gather(self, own: list[Any]) -> list[list[Any]]:
        self.num_sent += len(own)
        named = [
            list(zip(names_of([each[:2] for each in other]), other, strict=True))
            for other in self.others
        ]
        return [own, *named]

    def collect(self, step: int, own: list[Unreadable], *others: list[Unreadable]) -> list[str]:
        self.others = list(others)
        self.monitor.add(own)
        return self.monitor.collect(step)


def test_each_unreadable_sample_is_reported_once() -> None:
    ranks = Ranks()
    assert len(ranks.collect(10, [], lost(*range(UNREADABLE_SHOWN)))) == UNREADABLE_SHOWN + 1
    assert ranks.monitor.num_replaced == 10
    assert ranks.collect(20, lost(77, part=1), []) == [
        "77.tar: sample 'key 77 of 1' was replaced: broken",
        "step 20: 11 samples replaced since the start",
    ]
    assert ranks.collect(30, [], []) == []
    assert ranks.monitor.num_replaced == 11


def test_only_the_first_of_many_are_sent_and_named() -> None:
    ranks = Ranks()
    messages = ranks.collect(10, lost(*range(50)), lost(90))
    assert len(messages) == UNREADABLE_SHOWN + 1
    assert messages[-1] == (
        "step 10: 51 samples replaced since the start; 41 of the last 51 are not named here"
    )
    assert ranks.num_sent == UNREADABLE_SHOWN
    assert ranks.collect(20, []) == []


def test_too_many_unreadable_samples_end_the_run() -> None:
    monitor = Ranks(max_fraction=0.01)
    monitor.collect(1, lost(*range(10)))
    monitor.monitor.check_limit(10, num_samples=1000)  # 10 of an epoch of 1,000
    monitor.collect(2, [], lost(0))
    with pytest.raises(UserError, match=r"(?s)0\.tar: 11 samples.*the last: 'key 0 of 0'"):
        monitor.monitor.check_limit(20, num_samples=1000)
    monitor.monitor.check_limit(2000, num_samples=1000)  # 11 of 2,000 seen


def health(skipped: int, *, longest: int = 1, micro_steps: tuple[int, ...] = ()) -> Health:
    return Health(skipped=skipped, longest=longest, last_step=3, bad_micro_steps=micro_steps)


def skipped_monitor(
    gather: Callable[[Any], list[Any]] = lambda own: [own, ()],
) -> tuple[SkippedUpdateMonitor, list[str]]:
    order = SimpleNamespace(at=lambda position: SimpleNamespace(part=0, sample=position))
    data: Any = SimpleNamespace(order=order, parts=())
    messages: list[str] = []
    return SkippedUpdateMonitor(
        data=data, plan=PLAN, start_step=0, num_skipped=0, gather=gather
    ), messages


def test_skipped_updates_are_reported_with_their_samples() -> None:
    monitor, messages = skipped_monitor(gather=lambda own: [(), (1,)])
    monitor.update(health(2), step=20, loss_scale=None, say=messages.append)
    # Step 3 starts at sample 16; micro-step 1 of rank 1 is its last pair.
    assert messages == [
        "2 updates skipped, 2 since the start, the last at step 3: the loss was not finite "
        "on rank 1; samples 'key 22 of 0', 'key 23 of 0'"
    ]
    monitor.update(health(2), step=20, loss_scale=None, say=messages.append)
    assert len(messages) == 1


def test_a_bad_gradient_names_the_whole_step() -> None:
    monitor, messages = skipped_monitor()
    monitor.update(health(1), step=20, loss_scale=None, say=messages.append)
    assert "the gradient was not finite; samples 'key 16 of 0'" in messages[0]


def test_too_many_skipped_updates_in_a_row_end_the_run() -> None:
    monitor, messages = skipped_monitor()
    monitor.update(health(9, longest=9), step=20, loss_scale=None, say=messages.append)
    with pytest.raises(UserError, match="10 updates in a row were skipped, the last at step 3"):
        monitor.update(health(10, longest=10), step=20, loss_scale=None, say=messages.append)
    assert len(messages) == 2


@pytest.mark.parametrize("interval", [1, 7, 50, 100, 400])
def test_every_second_update_skipped_ends_the_run(interval: int) -> None:
    monitor, messages = skipped_monitor()
    with pytest.raises(UserError, match=r"of the last \d+ updates were skipped"):
        for step in range(interval, 401, interval):
            monitor.update(health(step // 2), step=step, loss_scale=None, say=messages.append)
    assert step == max(interval, {1: 22, 7: 28}.get(interval, 0))


@pytest.mark.parametrize("interval", [1, 50, 400])
def test_one_update_in_twenty_may_be_skipped(interval: int) -> None:
    monitor, messages = skipped_monitor()
    for step in range(interval, 801, interval):
        monitor.update(health(step // 20), step=step, loss_scale=None, say=messages.append)


def test_fp16_may_skip_while_it_searches_its_scale() -> None:
    monitor, messages = skipped_monitor()
    monitor.update(health(9, longest=9), step=20, loss_scale=1024.0, say=messages.append)
    with pytest.raises(UserError, match="10 updates in a row were skipped"):
        monitor.update(health(10, longest=10), step=20, loss_scale=1.0, say=messages.append)


def test_positions_of_a_micro_batch_are_those_the_rank_reads() -> None:
    plan = replace(PLAN, global_batch=12, micro_batch=3)
    step = 3
    for rank in range(2):
        batches = rank_batches(start=24, stop=36, rank=rank, world_size=2, micro_batch=3)
        for number, expected in enumerate(batches):
            found = positions_of_step(plan, step=step, micro_steps={rank: (number,)})
            assert found == expected
    assert positions_of_step(plan, step=step, micro_steps={}) == list(range(24, 36))
