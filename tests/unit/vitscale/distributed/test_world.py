"""Devices and stop signals of one rank; several ranks are in tests/integration."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from vitscale.config.errors import UserError
from vitscale.distributed.world import STOP_SIGNALS, PreemptionFlag, _pick_device


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


def test_rank_stopping_with_the_others_ignores_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PreemptionFlag() as stop:
        monkeypatch.setattr(stop, "_ask", lambda: True)  # as another rank's signal has it
        assert stop.set_on_any_rank()
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in STOP_SIGNALS)


def _see_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, *, in_slurm: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_PROCID", "3")


def test_task_with_one_visible_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpu-bind=single` shows every task another GPU, each as number 0."""
    _see_gpus(monkeypatch, "3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 0)


def test_task_that_sees_all_gpus_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, "0,1,2,3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 3)


def test_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(monkeypatch, "0", in_slurm=False)
    with pytest.raises(UserError, match="local rank 1 has no GPU: torch finds 1"):
        _pick_device("auto", 1)
