"""Exported models give the logits of an independent forward pass in NumPy; whole or absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import timm
import torch

from finetune.exporting.folder import EXPORTS, check_packages
from finetune.exporting.to_vitscale import SafetensorsFormat
from finetune.settings import ExportRun
from tests.support.engine.small_models import export, off_by, small_model
from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import open_model
from vitscale.models.weights.reading import read_weights

# What timm's folders hold beside the plain model.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gap": {"pool": "gap", "gelu": "erf"},
    "mae": {"pool": "gap", "class_token": True, "pool_norm": True},
    "registers": {"num_registers": 2},
    "no_class_position": {"class_position": False, "layer_scale": 0.1, "gelu": "erf"},
    "fixed_positions": {"positions": "sincos2d"},
    "distilled": {"distillation_token": True},
    "map": {"pool": "map"},
    "map_beside_class_token": {"pool": "map", "class_token": True, "num_registers": 1},
    "swiglu": {"mlp": "swiglu", "layer_scale": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_timm_gives_equal_logits(tmp_path: Path, kind: str) -> None:
    loaded = small_model(**KINDS[kind])
    folder = export(loaded, "timm", tmp_path / "out")
    assert off_by(timm.create_model(f"local-dir:{folder}", pretrained=True), loaded) < 1e-4
    assert off_by(timm.create_model(f"local-dir:{folder}"), loaded) > 0.1


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("class_position", [True, False])
def test_npz_is_read_by_timm(tmp_path: Path, class_position: bool, gelu: str) -> None:
    loaded = small_model(gelu=gelu, class_position=class_position)
    folder = export(loaded, "npz", tmp_path / "out")
    model: Any = timm.create_model(
        "vit_base_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=40 / 24,
        num_classes=5,
        no_embed_class=not class_position,
        act_layer="gelu_tanh" if gelu == "tanh" else "gelu",
    )
    model.load_pretrained(str(folder / "model.npz"), "" if class_position else "params/")
    assert off_by(model, loaded) < 1e-4


@pytest.mark.parametrize(
    "settings", [{"pool": "gap"}, {"representation_layer": True}, {"class_position": False}]
)
@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_weights_are_read_back_as_they_are(
    tmp_path: Path, settings: dict[str, Any], to: str
) -> None:
    loaded = small_model(**settings)
    path = export(loaded, to, tmp_path / "out") / f"model.{to}"
    found = read_weights(path).tensors
    own = loaded.network.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    again = export(loaded, to, tmp_path / "again") / path.name
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_exported_folders_are_loaded_by_init(tmp_path: Path, to: str) -> None:
    """With everything that weights do not show: GELU, epsilon, heads, preprocessing, names."""
    loaded = small_model(
        gelu="erf",
        layer_norm_eps=1e-5,
        classes=tuple("vwxyz"),
        preprocessing={"mean": (0.1, 0.2, 0.3), "eval_resize": "center_crop"},
    )
    umask = os.umask(0o027)
    try:
        folder = export(loaded, to, tmp_path / "out")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    found = open_model(str(folder))
    assert (found.arch, found.preprocessing) == (loaded.arch, loaded.preprocessing)
    assert found.classes == loaded.classes and off_by(found.network, loaded) < 1e-4
    (folder / f"model.{to}").unlink()
    with pytest.raises(UserError, match="but no weights"):
        open_model(str(folder))


def test_a_model_without_a_head_is_loaded_again(tmp_path: Path) -> None:
    assert open_model(str(export(small_model(num_classes=0), "npz", tmp_path / "o"))).arch.grid


@pytest.mark.parametrize(
    ("to", "settings", "problem"),
    [
        ("timm", {"representation_layer": True}, "a representation layer"),
        ("timm", {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05"),
        ("timm", {"head_width": 6}, "heads of a width of their own"),
        ("timm", {"pool": "cls_mean"}, "pool=cls_mean"),
        ("timm", {"mlp": "swiglu", "distillation_token": True}, "token beside mlp=swiglu"),
        ("huggingface", {"pool": "map"}, "pool=map"),
        ("huggingface", {"layer_scale": 0.1}, "pool=cls beside layer scale"),
        ("huggingface", {"pool": "cls_mean"}, "without layer scale"),
        ("huggingface", {"layer_scale": 0.1, "pool": "cls_mean"}, "an MLP of 40 hidden channels"),
        ("huggingface", {"distillation_token": True, "layer_scale": 1.0}, "SwiGLU in a deit"),
        ("huggingface", {"family": "timm"}, "a model of the family timm"),
        ("npz", {"layer_scale": 0.1}, "blocks.0.ls1.gamma"),
        ("npz", {"pool": "gap", "class_token": True}, "a class token that no head reads"),
        ("npz", {"family": "timm"}, "a model of the family timm"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, to: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=f"{to} cannot hold this model") as caught:
        export(small_model(**settings), to, tmp_path / "out")
    assert problem in caught.value.what
    assert "--to safetensors" in str(caught.value.allowed)
    assert not list(tmp_path.iterdir())


def test_other_logits_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, original = small_model(), SafetensorsFormat.write
    bias: Any = loaded.network.get_parameter("head.bias").data

    def write(self: SafetensorsFormat, model: Any, folder: Path) -> None:
        original(self, model, folder)
        bias.add_(0.01)  # other weights than those written

    monkeypatch.setattr(SafetensorsFormat, "write", write)
    with pytest.raises(UserError, match="gives other logits: difference 1.0e-02"):
        export(loaded, "safetensors", tmp_path / "out")
    bias[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        export(loaded, "safetensors", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_formats_are_the_choices_and_name_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(EXPORTS) == get_args(ExportRun.model_fields["to"].annotation)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for to in ("timm", "huggingface", "npz", "safetensors"):
        check_packages(to)
    with pytest.raises(UserError, match="to=onnx: needs onnx") as caught:
        check_packages("onnx")
    assert caught.value.next_step == "pip install -e '.[onnx]'"
