"""An exported folder is whole or absent, and says what it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.exporting.folder import EXPORTS, check_packages, write_folder
from finetune.exporting.to_vitscale import SafetensorsFormat
from finetune.settings import ExportRun
from tests.support.engine.small_models import small_model
from vitscale.config.errors import UserError


def run(folder: Path, to: Any = "safetensors") -> ExportRun:
    return ExportRun(init="x", to=to, output=str(folder))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for to in EXPORTS:
        check_packages(to)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for to in ("timm", "huggingface", "npz", "safetensors"):
        check_packages(to)
    with pytest.raises(UserError, match="to=onnx: needs onnx") as caught:
        check_packages("onnx")
    assert caught.value.next_step == "pip install -e '.[onnx]'"


def test_other_logits_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: SafetensorsFormat, loaded: Any, folder: Path) -> None:
        original(self, loaded, folder)
        with torch.no_grad():
            loaded.network.head.bias += 0.01  # other weights than those written

    original = SafetensorsFormat.write
    monkeypatch.setattr(SafetensorsFormat, "write", write)
    with pytest.raises(UserError, match="gives other logits: difference 1.0e-02"):
        list(write_folder(run(tmp_path / "out"), small_model()))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    loaded = small_model()
    with torch.no_grad():
        loaded.network.head.bias[0] = float("nan")  # type: ignore[index, operator, union-attr]  # a parameter
    with pytest.raises(UserError, match="not finite"):
        list(write_folder(run(tmp_path / "out"), loaded))
    assert not list(tmp_path.iterdir())
