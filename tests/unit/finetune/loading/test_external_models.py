"""Models of other libraries' files and folders give those libraries' logits, without `model:`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

from finetune.settings import ModelRun
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.models.costs import num_parameters

SIZE = 28
IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIZE}
SMALL |= {"patch_size": 7}
NAMES = {label: f"animal {label}" for label in range(5)}
TIMM: dict[str, Any] = {"img_size": SIZE, "patch_size": 7, "embed_dim": 32, "depth": 2}
TIMM |= {"num_heads": 4, "num_classes": 5}


@torch.no_grad()
def shaken(model: nn.Module) -> Any:
    """No parameter is at its usual start, where a lost one could go unnoticed."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model.eval()


def loaded(init: Path, **keys: Any) -> TrainedModel:
    return open_model(**ModelRun(init=str(init), **keys).source())


def logits(model: TrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.network(IMAGES)
    return found


@pytest.mark.parametrize(
    "kind, more",
    [
        ("ViT", {"hidden_act": "gelu"}),
        ("ViT", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
        ("ViT", {"hidden_act": "gelu_new"}),
        ("DeiT", {}),
    ],
)
def test_hugging_face_classifiers_give_their_logits(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{kind}Config")
    config = config(**SMALL, intermediate_size=48, id2label=NAMES, **more)
    theirs = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    with torch.no_grad():
        expected = theirs(IMAGES).logits
    assert expected.std() > 0.1
    assert torch.allclose(logits(ours), expected, atol=1e-5)
    assert ours.classes == tuple(NAMES.values())
    assert (ours.arch.image_size, ours.num_classes) == (SIZE, 5)


@pytest.mark.parametrize(
    "kind, more",
    [("Dinov2", {}), ("Dinov2", {"use_swiglu_ffn": True}), ("Dinov2WithRegisters", {})],
)
def test_dinov2_classifiers_see_class_token_and_mean(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL, num_labels=5, **more)
    theirs = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    with torch.no_grad():
        expected = theirs(IMAGES).logits
    assert (ours.arch.feature_width, ours.classes) == (64, None)
    assert expected.std() > 0.1
    assert torch.allclose(logits(ours), expected, atol=1e-5)
    counted = num_parameters(ours.arch)
    assert counted == sum(parameter.numel() for parameter in ours.network.parameters())


@pytest.mark.parametrize("kind", ["ViT", "ViTMAE", "Dinov2", "Dinov2WithRegisters"])
def test_hugging_face_trunks_give_their_features(tmp_path: Path, kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    theirs = shaken(getattr(transformers, f"{kind}Model")(config))
    theirs.save_pretrained(tmp_path)
    if kind == "ViTMAE":
        theirs.config.mask_ratio = 0.0  # it shuffles the patches, which the class token ignores
    ours = loaded(tmp_path)
    with torch.no_grad():
        expected = theirs(IMAGES).last_hidden_state[:, 0]
        found = ours.network(IMAGES, output="features")
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=1e-5)


def test_sharded_folders_load_as_whole_ones(tmp_path: Path) -> None:
    theirs = shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)))
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole, sharded = (logits(loaded(tmp_path / name)) for name in ("whole", "sharded"))
    assert torch.equal(whole, sharded)


@pytest.mark.parametrize(
    "written, expected",
    [
        (
            {"do_center_crop": False, "image_mean": [0.1] * 3, "resample": 3},
            {"eval_resize": "squash", "mean": (0.1,) * 3, "eval_interpolation": "bicubic"},
        ),
        (
            {
                "do_center_crop": True,
                "size": {"shortest_edge": 32},
                "crop_size": {"height": 28, "width": 28},
            },
            {"eval_resize": "center_crop", "eval_crop_fraction": 0.875},
        ),
        ({"do_normalize": False}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
    ],
)
def test_preprocessing_comes_with_the_folder(
    tmp_path: Path, written: dict[str, Any], expected: dict[str, Any]
) -> None:
    transformers.ViTModel(transformers.ViTConfig(**SMALL)).save_pretrained(tmp_path)
    assert loaded(tmp_path).preprocessing.mean == (0.5, 0.5, 0.5)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    found = loaded(tmp_path).preprocessing
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    "name, more",
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"act_layer": "gelu_tanh"}),
        ("vit_base_patch16_224", {"global_pool": "avg"}),
        ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False, "class_token": False}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch14_dinov2", {}),
        ("vit_small_patch14_reg4_dinov2", {}),
        ("vit_giant_patch14_dinov2", {}),
        ("vit_base_patch16_siglip_224", {}),
    ],
)
def test_timms_folders_give_its_logits(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    theirs = shaken(timm.create_model(name, **TIMM, **more))
    labels = [f"n{label}" for label in range(5)]
    save_for_hf(theirs, tmp_path, model_config={"label_names": labels}, model_args=TIMM | more)
    ours = loaded(tmp_path)
    with torch.no_grad():
        expected = theirs(IMAGES)
    assert expected.std() > 0.1
    assert torch.allclose(logits(ours), expected, atol=1e-5)
    assert ours.classes == tuple(labels)
    assert ours.preprocessing.mean == theirs.pretrained_cfg["mean"]
    counted = num_parameters(ours.arch)
    assert counted == sum(parameter.numel() for parameter in ours.network.parameters())


def test_descriptions_are_read_instead_of_synsets(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", **TIMM)
    labels = [f"n{label}" for label in range(5)]
    config = {"label_names": labels, "label_descriptions": {"n1": "tench, Tinca tinca"}}
    save_for_hf(theirs, tmp_path, model_config=config, model_args=TIMM)
    assert loaded(tmp_path).classes == ("n0", "tench, Tinca tinca", "n2", "n3", "n4")


@pytest.mark.parametrize("fraction", [0.9, 1.0])
def test_the_crop_comes_with_timms_folder(tmp_path: Path, fraction: float) -> None:
    theirs: Any = timm.create_model("vit_tiny_patch16_224", **TIMM)
    theirs.pretrained_cfg["crop_pct"] = fraction
    save_for_hf(theirs, tmp_path, model_args=TIMM)
    assert loaded(tmp_path).preprocessing.eval_crop_fraction == fraction


@pytest.mark.parametrize("name", ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_a_bare_file_needs_only_its_heads(tmp_path: Path, name: str) -> None:
    """Its width of 32 is of no known model."""
    theirs = shaken(timm.create_model(name, **TIMM))
    save_file(theirs.state_dict(), tmp_path / "bare.safetensors")
    with torch.no_grad():
        expected = theirs(IMAGES)
    with pytest.raises(ValueError, match="set model.num_heads"):
        loaded(tmp_path / "bare.safetensors")
    ours = loaded(tmp_path / "bare.safetensors", model={"name": "vit", "num_heads": 4})
    assert torch.allclose(logits(ours), expected, atol=1e-5)
