"""Means; reports of unreadable samples and skipped updates, and when they end a run."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.engine.subjects import WORLD
from tests.support.tables import every, refused, rows
from vitscale.data.order import rank_batches
from vitscale.data.samples import Unreadable
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.engine.gradients import Health
from vitscale.runs.training import TrainingPlan
from vitscale.training import interval_log
from vitscale.training.interval_log import (
    UNREADABLE_SHOWN,
    IntervalLog,
    IntervalMeans,
    SkippedUpdateMonitor,
    UnreadableSampleMonitor,
    names_of,
)
from vitscale.training.session import TrainingSession

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
# The order of samples is that of their numbers, so that a position names its sample.
ORDER = SimpleNamespace(at=lambda position: SimpleNamespace(part=0, sample=position))
DATA = SimpleNamespace(order=ORDER, parts=())


def names(samples):
    return [f"'key {sample} of {part}'" for part, sample in samples]


class Ranks:
    """What rank 0 gathers: its own, and what `others` send; and what it prints."""

    def __init__(self):
        self.others = []
        self.sent = None
        self.lines = []

    def gather(self, own):
        self.sent = own
        return [own, *self.others]

    def unreadable(self, max_fraction, *, num_replaced=0):
        return UnreadableSampleMonitor(
            data=DATA,
            names=names,
            max_fraction=max_fraction,
            num_replaced=num_replaced,
            say=self.lines.append,
        )

    def skipped(self):
        return SkippedUpdateMonitor(
            data=DATA,
            names=names,
            plan=PLAN,
            say=self.lines.append,
            start_step=0,
            num_skipped=0,
        )

    def report(
        self,
        monitor,
        own,
        other=(),
        num_seen=10,
    ):
        """The lines that are printed at step 10 of an epoch of 1,000 samples."""
        # A rank sends the number of its samples, and as many as are named.
        self.others = [(len(other), list(other))]
        self.lines.clear()
        monitor.add(own)
        monitor.report(10, num_seen=num_seen, num_samples=1000)
        return self.lines


@pytest.fixture
def ranks(monkeypatch):
    """Instead of collectives; names of samples without an index."""
    ranks = Ranks()
    monkeypatch.setattr(interval_log, "gather_objects", ranks.gather)
    return ranks


def lost(*samples, part=0):
    return [Unreadable(part, sample, f"{sample}.tar", "broken") for sample in samples]


def test_each_unreadable_sample_is_reported_once(ranks):
    # Those of the other rank are named as those of rank 0.
    monitor = ranks.unreadable(0.1)
    lines = ranks.report(monitor, [], lost(*range(UNREADABLE_SHOWN)))
    assert len(lines) == UNREADABLE_SHOWN + 1
    assert ranks.report(monitor, lost(77, part=1)) == [
        "77.tar: sample 'key 77 of 1' was replaced: broken",
        "step 10: 11 samples replaced since step 0",
    ]

    # An interval without one has no line.
    assert ranks.report(monitor, []) == []
    assert monitor.num_replaced == 11

    # Many would fill the log, so only the first are sent and named.
    lines = ranks.report(monitor, lost(*range(50)), lost(90))
    assert len(lines) == UNREADABLE_SHOWN + 1
    assert len(ranks.sent[1]) == UNREADABLE_SHOWN
    assert lines[-1] == (
        "step 10: 62 samples replaced since step 0; 41 of the last 51 are not named here"
    )


def test_too_many_unreadable_samples_end_the_run(ranks):
    # The limit is 1 % of what has been seen, and of an epoch while less than one has been.
    monitor = ranks.unreadable(0.01)
    ranks.report(monitor, lost(*range(10)))  # 10 of an epoch of 1,000
    ranks.report(monitor, lost(11), num_seen=2000)  # 11 of 2,000 seen
    with refused(r"(?s)0\.tar: 12 samples.*the last: 'key 0 of 0'"):
        ranks.report(monitor, [], lost(0), num_seen=20)


def test_samples_replaced_before_a_resume_count(ranks):
    """A run that is stopped often may replace no more samples than one that is not."""
    # A new process, with what the checkpoint says of the old one.
    monitor = ranks.unreadable(0.01, num_replaced=9)

    # The limit is of an epoch, 10 samples.
    lines = ranks.report(monitor, lost(5))
    assert lines[-1] == "step 10: 10 samples replaced since step 0"
    with refused("11 samples could not be read, more than "):
        ranks.report(monitor, lost(6))


@rows("""
- [rank, expected]
- [0, ['''train-00003''', '''train-00001''']]
- [1, [number 3 of 'train', number 1 of 'train']]
""")
def test_the_index_is_read_on_the_rank_that_prints_alone(tmp_path, rank, expected):
    """Damaged or not: other ranks do not look at it."""
    folder = write_shard_folder(tmp_path / "shards", num_per_class=8, num_shards=2)
    data = open_training_set(DataSettings(path=str(folder), global_batch=2), seed=0)
    names_of_samples = names_of(data, is_first=rank == 0)
    assert names_of_samples([(0, 3), (0, 1)]) == expected

    # Both monitors of a run take the names so.
    log = opened(data, replace(WORLD, rank=rank))
    for monitor in (log._skipped, log._unreadable):
        assert monitor.names([(0, 3)]) == expected[:1]


# ---- rates ---------------------------------------------------------------------------------------


def opened(data, world):
    """The log of a run, as far as it needs no engine."""
    health = Health(
        skipped=0,
        longest=0,
        last_step=None,
        bad_micro_step=None,
    )
    engine = SimpleNamespace(world=world, health=lambda: health)
    run = SimpleNamespace(data=SimpleNamespace(max_unreadable_fraction=1.0))
    return IntervalLog(
        run,
        PLAN,
        data,
        engine,
        start_step=0,
        num_replaced=0,
        flops_per_image=1.0,
        tracker=None,
        say=print,
        profile=lambda: None,
        warning=lambda means: None,
    )


class Seconds:
    """A clock that only training, evaluations and saves advance."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def spend(self, seconds):
        def work(*_, **__):
            self.now += seconds

        return work


@pytest.fixture
def clock(monkeypatch):
    """With sums over two equal ranks."""
    clock = Seconds()
    monkeypatch.setattr(interval_log, "time", clock)
    monkeypatch.setattr(interval_log, "sum_over_ranks", lambda own: 2 * own)
    return clock


@every(save_every="3, 100", evaluate_every="0, 1, 2, 4", log_every="1, 2, 3, 5")
def test_rates_leave_out_evaluations_and_saves(
    monkeypatch,
    clock,
    log_every,
    evaluate_every,
    save_every,
):
    """Every interval has the same rate, however long what comes between its steps."""
    rates = []
    log = opened(DATA, replace(WORLD, world_size=2))

    def write(step, lr):
        rates.append(log._speed()["vitals/images_per_s"])

    monkeypatch.setattr(log, "write", write)

    # All that the end of a step needs; evaluations take far longer than steps, and saves long.
    session = SimpleNamespace(
        log=log,
        lr=0.1,
        plan=PLAN,
        run=SimpleNamespace(
            checkpoint=SimpleNamespace(every_steps=save_every),
            tracking=SimpleNamespace(log_every_steps=log_every),
        ),
        watchdog=SimpleNamespace(),
        preemption=SimpleNamespace(set_on_any_rank=lambda: False),
        store=SimpleNamespace(take_committed=lambda: None),
        evaluations=SimpleNamespace(
            due=lambda step, is_last: evaluate_every and step % evaluate_every == 0
        ),
        objective=SimpleNamespace(draw=clock.spend(1e4)),
        _report=lambda commit: None,
        _best_score=None,
        _evaluate=clock.spend(1000.0),
        _save=clock.spend(100.0),
    )

    # The first step compiles, and shows in the first interval alone.
    batch = SimpleNamespace(labels=range(6), unreadable=())
    clock.now += 57.0
    for step in range(PLAN.total_steps):
        clock.now += 3.0
        log.add_batch(batch)
        TrainingSession.end_step(session, step)

    # Two ranks with 6 images each: in 57 + 3 s, and from then on in 3 s.
    if 1 in (log_every, evaluate_every):
        assert rates.pop(0) == pytest.approx(2 * 6 / 60)
    assert rates == [pytest.approx(2 * 6 / 3)] * len(rates)
    assert len(rates) >= 100 // log_every - 1


def test_the_share_of_time_spent_waiting_for_data_is_that_of_a_rank(clock):
    log = opened(DATA, replace(WORLD, world_size=2))
    batch = SimpleNamespace(labels=range(6), unreadable=())
    log.add_batch(batch)

    # 2 s of 8 s, on each of two ranks: not 4 of 8.
    with log.waiting():
        clock.now += 2.0
    clock.now += 6.0
    speed = log._speed()
    assert speed == {"vitals/images_per_s": 2 * 6 / 8, "vitals/data_wait": 2 / 8}


def test_an_update_waits_until_a_save_has_read_the_weights():
    """After the backward pass, which may run beside the copy."""
    order = []
    session = SimpleNamespace(
        watchdog=SimpleNamespace(mark=lambda doing: None),
        engine=SimpleNamespace(
            backward=lambda loss: order.append("backward"),
            step=lambda: order.append("update"),
        ),
        store=SimpleNamespace(wait_for_host_copy=lambda: order.append("copied")),
        log=SimpleNamespace(means=IntervalMeans()),
        objective=SimpleNamespace(recorded={}),
        batches=SimpleNamespace(prefetch=lambda: None),
        _waiting_for_data=nullcontext,
    )
    TrainingSession.update(session, torch.tensor(1.0))

    # An update before the copy would save weights of two steps.
    assert order == ["backward", "copied", "update"]


def health(skipped, *, longest=1):
    return Health(
        skipped=skipped,
        longest=longest,
        last_step=3,
        bad_micro_step=None,
    )


def test_skipped_updates_are_reported_once_with_their_samples(ranks):
    """Of a bad loss those that its rank read for the micro-step, else all of the step."""
    # The same two are reported at each interval.
    monitor = ranks.skipped()
    ranks.others = [1]
    for _ in range(2):
        monitor.update(health(2), step=20, loss_scale=None)

    # The second micro-step of rank 1 in the step that was skipped.
    batches = rank_batches(start=16, stop=24, rank=1, world_size=2, micro_batch=2)
    read = list(batches)
    assert read[1] == [22, 23]
    assert ranks.lines == [
        "2 updates skipped, 2 since the start, the last at step 3: the loss was not finite "
        "on rank 1; samples 'key 22 of 0', 'key 23 of 0'"
    ]
    ranks.others = [None]
    monitor.update(health(3), step=30, loss_scale=None)
    samples = ", ".join(f"'key {sample} of 0'" for sample in range(16, 24))
    assert ranks.lines[1].endswith(f"the gradient was not finite; samples {samples}")


@every(scale="null, 1.0")
def test_too_many_skipped_updates_in_a_row_end_the_run(ranks, scale):
    """But while fp16 searches its scale."""
    monitor = ranks.skipped()

    # Nine are allowed, and ten with a loss scale that can still fall.
    monitor.update(health(9, longest=9), step=20, loss_scale=scale)
    monitor.update(health(19, longest=10), step=20, loss_scale=1024.0)
    with refused("10 updates in a row were skipped, the last at step 3"):
        monitor.update(health(20, longest=10), step=20, loss_scale=scale)


@every(interval="1, 7, 100, 400")
def test_every_second_update_skipped_ends_the_run_but_not_one_in_twenty(
    ranks, interval
):
    few = ranks.skipped()
    many = ranks.skipped()
    for step in range(interval, 801, interval):
        few.update(health(step // 20), step=step, loss_scale=None)
    with refused(r"of the last \d+ updates were skipped"):
        for step in range(interval, 401, interval):
            many.update(health(step // 2), step=step, loss_scale=None)

    # More than ten of the last hundred: the eleventh is skipped in step 22.
    assert step == max(interval, {1: 22, 7: 28}.get(interval, 0))


def test_means_by_name_are_over_ranks_and_finite_values(clock):
    means = IntervalMeans()
    for value in (1.0, math.nan, 3.0):
        both = {"a": torch.tensor(value), "b": torch.tensor(math.inf)}
        means.add(both)
    averages = means.read()
    assert averages["a"] == 2.0

    # Nothing finite has no mean, and 0 would look like a result.
    assert math.isnan(averages["b"])

    # The next interval starts anew.
    means.add({"a": torch.tensor(5.0)})
    assert means.read() == {"a": 5.0}


def test_time_left_counts_evaluations_and_saves(
    monkeypatch,
):
    """A start of 50 s, a second a step, and 20 s for an evaluation before step 30."""
    # Seconds since the start, and those that are left, at each of four reports.
    log: Any = SimpleNamespace(
        _paced_from=(0.0, 0),
        start_step=0,
        plan=PLAN,
    )
    for step, now, left in (
        (10, 60, 540),
        (20, 70, 80),
        (30, 100, 140),
        (40, 110, 100),
    ):
        monkeypatch.setattr(interval_log.time, "perf_counter", lambda now=now: now)
        assert IntervalLog._seconds_left(log, step) == pytest.approx(left)


def test_a_warning_is_said_once_and_not_in_the_first_steps(clock, world, capsys):
    log = opened(DATA, world)
    log.engine.gradient_norm = lambda: 1.0
    log.engine.loss_scale = None
    log.tracker = SimpleNamespace(log=lambda metrics, step: None)
    log.means = SimpleNamespace(read=lambda: {"train/loss": 1.0})
    answers = iter(["w", "w", None, "w"])
    log.warning = lambda means: next(answers)
    first = PLAN.total_steps // 20
    for step in (1, first, first + 1, first + 2, first + 3, first + 4):
        clock.spend(1)()
        log.write(step, lr=0.0)
    said = [line for line in capsys.readouterr().out.splitlines() if line[-3:] == ": w"]
    assert said == [f"step {first + 1}: w", f"step {first + 4}: w"]


def test_the_samples_of_a_skipped_update_are_those_of_the_rank_and_micro_step(
    ranks,
):
    """Unlike the number of the rank and of its micro-step: exchanged, they are other samples."""
    # Step 3 has positions 16 to 23: two for rank 0, two for rank 1, and once more.
    ranks.others = [0]
    ranks.skipped().update(health(1), step=10, loss_scale=None)
    assert ranks.lines[0].endswith("on rank 1; samples 'key 18 of 0', 'key 19 of 0'")
