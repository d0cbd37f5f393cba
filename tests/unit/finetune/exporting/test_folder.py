"""An exported folder is whole or absent, and says what it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune.exporting.folder import check_folder, check_packages, write_folder
from finetune.exporting.registry import EXPORTS
from finetune.exporting.settings import ExportRun
from finetune.exporting.to_safetensors import SafetensorsFormat
from tests.support.engine.small_models import small_model
from vitscale.config.errors import UserError


def run(folder: Path, to: Any = "safetensors") -> ExportRun:
    return ExportRun(init="x", to=to, output=str(folder))


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check_folder(str(tmp_path / "out"))
    list(write_folder(run(tmp_path / "out"), small_model()))
    with pytest.raises(UserError, match="is not empty"):
        check_folder(str(tmp_path / "out"))
    with pytest.raises(UserError, match="is a file"):
        check_folder(str(tmp_path / "out/README.md"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="output=.*cannot be written"):
        list(write_folder(run(tmp_path / "file/out"), small_model()))


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


def test_card_says_how_to_load_it(tmp_path: Path) -> None:
    # 16 / 0.9 is 17.8; the crop rounds down.
    crop = {"eval_resize": "center_crop", "eval_crop_fraction": 0.9}
    loaded = small_model(classes=("a", "b", "c", "d", "e"), preprocessing=crop)
    list(write_folder(run(tmp_path / "out", "timm"), loaded))
    card = (tmp_path / "out/README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["vitscale", "vit"],
    }
    for part in (
        'timm.create_model("local-dir:FOLDER", pretrained=True)',
        "Without `pretrained=True` timm builds the model with random weights",
        "classes: 5 (a, b, c, d, e)",
        "weights from: a small vit",
        "short side is resized to 17 px (bilinear), and the centre 16 x 16 px",
        "parameters: 2 blocks of width 24 with 3 heads, patches of 4 px, 17 tokens",
        "## Licence\nNot stated.",
    ):
        assert part in card
