"""Stop signals of one rank; several are in tests/integration."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from vitscale.distributed.preemption import STOP_SIGNALS, PreemptionFlag


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_handlers_are_restored_without_a_stop() -> None:
    previous = [signal.getsignal(number) for number in STOP_SIGNALS]
    with PreemptionFlag() as stop:
        assert not stop.set_on_any_rank()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == previous


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_repeated_stop_signal_is_ignored(number: signal.Signals) -> None:
    with PreemptionFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.set_on_any_rank()
    for again in STOP_SIGNALS:
        assert signal.getsignal(again) is signal.SIG_IGN
        os.kill(os.getpid(), again)
