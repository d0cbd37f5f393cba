"""The device and the signals of one rank; several ranks are in tests/scripts/training."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from vitscale.config.errors import UserError
from vitscale.distributed.world import (
    STOP_SIGNALS,
    PreemptionFlag,
    World,
    _choose_interface,
    _pick_device,
)


def _see_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, *, in_slurm: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_PROCID", "3")


def test_a_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpu-bind=single` shows every task another GPU, each as number 0."""
    _see_gpus(monkeypatch, "3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 0)
    _see_gpus(monkeypatch, "0,1,2,3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 3)
    _see_gpus(monkeypatch, "0", in_slurm=False)
    with pytest.raises(UserError, match="local rank 1 has no GPU: torch finds 1"):
        _pick_device("auto", 1)


def test_a_driver_too_old_for_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch only warns, and a training on the CPU would go on for weeks."""

    def is_available() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _pick_device("auto", 0).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    for wanted in ("auto", "cuda"):
        with pytest.raises(UserError, match="driver on your system is too old"):
            _pick_device(wanted, 0)  # type: ignore[arg-type]  # a literal
    assert _pick_device("cpu", 0).type == "cpu"


def test_gloo_takes_the_network_of_the_route_to_the_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"rank": 1, "world_size": 2, "local_rank": 0, "local_world_size": 1}
    world = World(device=torch.device("cpu"), **ranks)
    address = SimpleNamespace(address="127.0.0.1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [address], "ib0": [address]})
    for host, found in (("nowhere.invalid", None), ("127.0.0.1", "ib0")):
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": host})
        _choose_interface(world)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == found


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_handlers_are_restored_without_a_stop() -> None:
    previous = [signal.getsignal(number) for number in STOP_SIGNALS]
    with PreemptionFlag() as stop:
        assert not stop.set_on_any_rank()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == previous


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_repeated_stop_signal_is_ignored(number: signal.Signals) -> None:
    with PreemptionFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.set_on_any_rank()
    for again in STOP_SIGNALS:
        assert signal.getsignal(again) is signal.SIG_IGN
        os.kill(os.getpid(), again)
