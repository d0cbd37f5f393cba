"""Stop signals and the step at which simulated ranks stop; processes are in tests/integration."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from vitscale.distributed import preemption
from vitscale.distributed.preemption import STOP_SIGNALS, PreemptionFlag
from vitscale.distributed.world import World


def world_of(rank: int, world_size: int, store: dist.Store | None) -> World:
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=torch.device("cpu"),
        store=store,
    )


ONE_RANK = world_of(0, 1, None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_handlers_are_restored_without_a_stop() -> None:
    previous = [signal.getsignal(number) for number in STOP_SIGNALS]
    with PreemptionFlag(ONE_RANK) as stop:
        assert not stop.set_on_any_rank()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == previous


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_repeated_stop_signal_is_ignored(number: signal.Signals) -> None:
    with PreemptionFlag(ONE_RANK) as stop:
        os.kill(os.getpid(), number)
        assert stop.set_on_any_rank()
    for again in STOP_SIGNALS:
        assert signal.getsignal(again) is signal.SIG_IGN
        os.kill(os.getpid(), again)


@pytest.mark.parametrize("world_size, rank", [(2, 1), (2, 0), (24, 17)])
def test_all_ranks_stop_at_the_same_step(
    monkeypatch: pytest.MonkeyPatch, world_size: int, rank: int
) -> None:
    """Ranks as threads that share nothing but the store, and run ahead of each other at will."""
    monkeypatch.setattr(preemption, "_numbers", iter([0] * world_size))  # one of each process
    monkeypatch.setattr(preemption, "PATIENCE_S", 120.0)
    store = dist.HashStore()
    decisions = [preemption._Decisions(world_of(r, world_size, store)) for r in range(world_size)]

    def train(own: int) -> int:
        rng, received = random.Random(own), False
        for step in range(2000):
            received = received or (own == rank and step == 5)
            if rng.random() < 0.1:
                preemption.time.sleep(rng.random() / 1000)
            if decisions[own].ask(received):
                return step
        return -1

    with ThreadPoolExecutor(world_size) as pool:
        steps = list(pool.map(train, range(world_size)))
    for each in decisions:
        each.close()
    assert len(set(steps)) == 1 and steps[0] >= 6
