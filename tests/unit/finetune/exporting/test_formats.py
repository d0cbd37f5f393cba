"""Exported models give the logits of an independent forward pass in NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import timm
import torch

from finetune.exporting.folder import EXPORTS, write_folder
from finetune.settings import ExportRun
from tests.support.engine.numpy_vit import vit_logits
from tests.support.engine.small_models import small_model
from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.models.weights.reading import read_weights

GELUS = ("tanh", "erf")
# What timm's folders hold beside the plain model.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gap": {"pool": "gap"},
    "mae": {"pool": "gap", "class_token": True, "pool_norm": True},
    "registers": {"num_registers": 2},
    "no_class_position": {"class_position": False, "layer_scale": 0.1},
    "fixed_positions": {"positions": "sincos2d"},
    "distilled": {"distillation_token": True},
    "map": {"pool": "map"},
    "map_beside_class_token": {"pool": "map", "class_token": True, "num_registers": 1},
    "swiglu": {"mlp": "swiglu", "layer_scale": 0.1},
}


def export(loaded: TrainedModel, to: str, folder: Path) -> Path:
    run = ExportRun(init="x", to=to, output=str(folder))  # type: ignore[arg-type]  # any format
    list(write_folder(run, loaded))
    return folder


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def expected(loaded: TrainedModel, images_B3HW: torch.Tensor) -> np.ndarray:
    settings: Any = loaded.settings
    weights = {name: value.numpy() for name, value in loaded.network.state_dict().items()}
    if "pos_embed" not in weights:
        weights["pos_embed"] = loaded.network.pos_embed.numpy()  # type: ignore[operator, union-attr]  # a buffer
    return vit_logits(
        weights,
        images_B3HW.numpy(),
        num_heads=settings.num_heads,
        gelu=settings.gelu,
        pool=settings.pool,
        eps=settings.layer_norm_eps,
    )


def difference(found: torch.Tensor, loaded: TrainedModel, images_B3HW: torch.Tensor) -> float:
    return float(np.abs(found.detach().numpy() - expected(loaded, images_B3HW)).max())


@pytest.mark.parametrize("gelu", GELUS)
@pytest.mark.parametrize("kind", KINDS)
def test_timm_gives_equal_logits(tmp_path: Path, kind: str, gelu: str) -> None:
    loaded = small_model(gelu=gelu, **KINDS[kind])
    folder = export(loaded, "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    pixels = images()
    assert difference(model(pixels), loaded, pixels) < 1e-4
    without = timm.create_model(f"local-dir:{folder}").eval()
    assert difference(without(pixels), loaded, pixels) > 0.1


@pytest.mark.parametrize("gelu", GELUS)
@pytest.mark.parametrize("kind", ["plain", "no_class_position"])
def test_npz_is_read_by_timm(tmp_path: Path, kind: str, gelu: str) -> None:
    kinds = {"plain": {}, "no_class_position": {"class_position": False}}
    loaded = small_model(gelu=gelu, **kinds[kind])
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
        no_embed_class=kind == "no_class_position",
        act_layer="gelu_tanh" if gelu == "tanh" else "gelu",
    ).eval()
    model.load_pretrained(str(folder / "model.npz"), "params/" if "no" in kind else "")
    assert difference(model(images()), loaded, images()) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [{}, {"pool": "gap"}, {"representation_layer": True}, {"class_position": False}],
)
@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_weights_are_read_back_as_they_are(
    tmp_path: Path, settings: dict[str, Any], to: str
) -> None:
    loaded = small_model(**settings)
    folder = export(loaded, to, tmp_path / "out")
    path = folder / f"model.{to}"
    found = read_weights(path, grid=loaded.arch.grid).tensors
    own = loaded.network.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    loaded.network.load_state_dict(found)
    again = export(loaded, to, tmp_path / "again") / path.name
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("to", "settings", "problem"),
    [
        ("timm", {"representation_layer": True}, "a representation layer"),
        ("timm", {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05"),
        ("timm", {"head_width": 6}, "heads of a width of their own"),
        ("timm", {"pool": "cls_mean"}, "pool=cls_mean"),
        ("timm", {"mlp": "swiglu", "distillation_token": True}, "token beside mlp=swiglu"),
        ("huggingface", {"pool": "map"}, "pool=map"),
        ("huggingface", {**KINDS["mae"]}, "pool=gap"),
        ("huggingface", {"layer_scale": 0.1}, "pool=cls beside layer scale"),
        ("huggingface", {"pool": "cls_mean"}, "without layer scale"),
        ("huggingface", {"layer_scale": 0.1, "pool": "cls_mean"}, "an MLP of 40 hidden channels"),
        (
            "huggingface",
            {"distillation_token": True, "layer_scale": 1.0},
            "layer scale or SwiGLU in",
        ),
        ("npz", {"layer_scale": 0.1}, "blocks.0.ls1.gamma"),
        ("npz", {"pool": "gap", "class_token": True}, "a class token that no head reads"),
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


@pytest.mark.parametrize("to", ["huggingface", "npz"])
def test_models_of_timm_without_a_place_are_refused(tmp_path: Path, to: str) -> None:
    with pytest.raises(UserError, match=f"{to} cannot hold this model.*the family timm") as caught:
        export(small_model("timm"), to, tmp_path / "out")
    assert caught.value.allowed == "--to timm, --to onnx, --to safetensors"


def test_formats_are_the_choices_of_the_settings() -> None:
    assert tuple(EXPORTS) == get_args(ExportRun.model_fields["to"].annotation)


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
    found = open_model(**ExportRun(init=str(folder), to="timm", output="x").source())
    assert (found.arch, found.preprocessing, found.classes) == (
        loaded.arch,
        loaded.preprocessing,
        loaded.classes,
    )
    assert difference(found.network(images()), loaded, images()) < 1e-4
    (folder / f"model.{to}").unlink()
    with pytest.raises(UserError, match="but no weights"):
        open_model(**ExportRun(init=str(folder), to="timm", output="x").source())
