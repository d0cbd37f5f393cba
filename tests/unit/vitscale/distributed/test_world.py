"""The device of one rank; several ranks are in tests/integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.distributed.processes import nvidia_driver
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


PROC = """NVRM version: NVIDIA UNIX {kind}  {version}  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [("auto", "x86_64 Kernel Module"), ("cuda", "Open Kernel Module for x86_64")],
)
def test_a_driver_too_old_for_cuda_is_named(
    wanted: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitscale.distributed.world.nvidia_driver", lambda: nvidia_driver(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert nvidia_driver(tmp_path) is None and _pick_device("auto", 0).type == "cpu"
    (tmp_path / "version").write_text(PROC.format(kind=kind, version="535.104.05"))
    with pytest.raises(UserError, match=r"driver 535.104.05 (.|\n)* CUDA 13.0 (.|\n)*--index-url"):
        _pick_device(wanted, 0)
    assert _pick_device("cpu", 0).type == "cpu"
    (tmp_path / "version").write_text(PROC.format(kind=kind, version="580.65.06"))
    assert _pick_device("auto", 0).type == "cpu"


def test_gloo_takes_the_network_of_the_route_to_the_first_rank() -> None:
    assert _interface_to("127.0.0.1") == "lo" and _interface_to("nowhere.invalid") is None
