"""The device of one rank; several ranks are in tests/integration."""

from __future__ import annotations

import warnings

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.distributed.world import _interface_to, _pick_device


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


def test_gloo_takes_the_network_of_the_route_to_the_first_rank() -> None:
    assert _interface_to("127.0.0.1") == "lo" and _interface_to("nowhere.invalid") is None
