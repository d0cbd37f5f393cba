"""What is said of replaced samples, and when they end a run; collectives are stubs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vitscale.config.errors import UserError
from vitscale.data.samples import Unreadable
from vitscale.training import loop as training_loop
from vitscale.training.loop import UNREADABLE_SHOWN, Training


class Job:
    """Rank 0 of several, with the losses of all since the last log line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fraction: float = 0.1) -> None:
        self.messages: list[str] = []
        self.gathered = 0
        self.others: list[list[Unreadable]] = [[]]
        self.rank: Any = SimpleNamespace(
            unreadable=[],
            unreadable_told=0,
            progress=SimpleNamespace(message=self.messages.append),
            tracker=SimpleNamespace(log=lambda figures, step: self.figures.append(figures)),
            start_step=0,
            plan=SimpleNamespace(global_batch=10, num_samples=1000),
            run=SimpleNamespace(data=SimpleNamespace(max_unreadable_fraction=fraction)),
            data=SimpleNamespace(parts=()),
        )
        self.figures: list[dict[str, float]] = []
        monkeypatch.setattr(training_loop, "sum_over_ranks", self._sum)
        monkeypatch.setattr(training_loop, "gather_objects", self._gather)
        monkeypatch.setattr(training_loop, "sample_names", lambda parts, samples: _names(samples))

    def _sum(self, own: Any) -> Any:
        return own + sum(map(len, self.others))

    def _gather(self, own: list[Any]) -> list[list[Any]]:
        self.gathered += len(own)
        named = [
            list(zip(_names([each[:2] for each in other]), other, strict=True))
            for other in self.others
        ]
        return [own, *named]

    def check(self, step: int, own: list[Unreadable], *others: list[Unreadable]) -> list[str]:
        """What is said."""
        self.messages.clear()
        self.rank.unreadable.extend(own)
        self.others = list(others)
        Training._check_unreadable(self.rank, step)
        return self.messages


def _names(samples: list[tuple[int, int]]) -> list[str]:
    return [f"'key {sample} of {part}'" for part, sample in samples]


def lost(*samples: int, part: int = 0) -> list[Unreadable]:
    return [Unreadable(part, sample, f"{sample}.tar", "broken") for sample in samples]


def test_each_replaced_sample_is_named_once_whatever_other_ranks_lost_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    assert len(job.check(10, [], lost(*range(UNREADABLE_SHOWN)))) == UNREADABLE_SHOWN + 1
    assert job.check(20, lost(77, part=1), []) == [
        "77.tar: sample 'key 77 of 1' was replaced: broken",
        "step 20: 11 samples replaced since the start",
    ]
    assert job.check(30, [], []) == []
    assert job.figures == [{"data/unreadable": 10.0}, {"data/unreadable": 11.0}]


def test_of_many_only_the_first_are_sent_and_named_and_the_rest_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    said = job.check(10, lost(*range(50)), lost(90))
    assert len(said) == UNREADABLE_SHOWN + 1
    assert said[-1] == (
        "step 10: 51 samples replaced since the start, of the last 51 another 41 not named here"
    )
    assert job.gathered == UNREADABLE_SHOWN and job.rank.unreadable == []


def test_more_than_the_allowed_share_of_the_samples_seen_or_of_an_epoch_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, fraction=0.01)
    job.check(1, lost(*range(10)))  # of 1,000 in an epoch
    with pytest.raises(UserError, match=r"(?s)0\.tar: 11 samples.*the last: 'key 0 of 0'"):
        job.check(2, [], lost(0))
    job = Job(monkeypatch, fraction=0.01)
    job.check(200, lost(*range(20)))  # of 2,000 seen
    with pytest.raises(UserError, match="max_unreadable_fraction=0.01"):
        job.check(200, lost(1))
