"""Files and folders of other libraries give those libraries' logits, without `model:`."""

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

from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import TrainedModel, open_model
from vitscale.models.costs import num_parameters
from vitscale.models.settings import ViTSettings

SIZE = 28
IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIZE}
SMALL |= {"patch_size": 7}
NAMES = {label: f"animal {label}" for label in range(5)}
TIMM: dict[str, Any] = {"img_size": SIZE, "patch_size": 7, "embed_dim": 32, "depth": 2}
TIMM |= {"num_heads": 4, "num_classes": 5}
TINY = "vit_tiny_patch16_224"


@torch.no_grad()
def shaken(model: nn.Module) -> Any:
    """No parameter is at its usual start, where a lost one could go unnoticed."""
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return model.eval()


def check(ours: TrainedModel, expected: torch.Tensor, output: str = "logits") -> None:
    with torch.no_grad():
        found = ours.network(IMAGES, output=output)
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, atol=1e-5)
    counted = sum(parameter.numel() for parameter in ours.network.parameters())
    assert num_parameters(ours.arch) == counted


@pytest.mark.parametrize(
    "kind, more",
    [
        ("ViT", {"hidden_act": "gelu", "intermediate_size": 48}),
        ("ViT", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
        ("ViT", {"hidden_act": "gelu_new"}),
        ("DeiT", {}),
        ("Dinov2", {}),
        ("Dinov2", {"use_swiglu_ffn": True}),
        ("Dinov2WithRegisters", {}),
    ],
)
def test_hugging_face_classifiers_give_their_logits(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL, id2label=NAMES, **more)
    theirs = shaken(getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path)
    ours = open_model(str(tmp_path))
    with torch.no_grad():
        check(ours, theirs(IMAGES).logits)
    assert ours.classes == tuple(NAMES.values())
    assert (ours.arch.image_size, ours.num_classes) == (SIZE, 5)


@pytest.mark.parametrize("kind", ["ViT", "ViTMAE", "Dinov2", "Dinov2WithRegisters"])
def test_hugging_face_trunks_give_their_features(tmp_path: Path, kind: str) -> None:
    """Whole, and in shards."""
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    theirs = shaken(getattr(transformers, f"{kind}Model")(config))
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    if kind == "ViTMAE":
        theirs.config.mask_ratio = 0.0  # it shuffles the patches, which the class token ignores
    with torch.no_grad():
        expected = theirs(IMAGES).last_hidden_state[:, 0]
    for name in ("whole", "sharded"):
        check(open_model(str(tmp_path / name)), expected, "features")


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
    assert open_model(str(tmp_path)).preprocessing.mean == (0.5, 0.5, 0.5)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    found = open_model(str(tmp_path)).preprocessing
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    "name, more",
    [
        (TINY, {}),
        (TINY, {"act_layer": "gelu_tanh"}),
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
    theirs.pretrained_cfg["crop_pct"] = 0.93
    config = {"label_names": [f"n{label}" for label in range(5)]}
    config |= {"label_descriptions": {"n1": "tench, Tinca tinca"}}
    save_for_hf(theirs, tmp_path, model_config=config, model_args=TIMM | more)
    ours = open_model(str(tmp_path))
    with torch.no_grad():
        check(ours, theirs(IMAGES))
    # Descriptions are read instead of synsets.
    assert ours.classes == ("n0", "tench, Tinca tinca", "n2", "n3", "n4")
    assert ours.preprocessing.mean == theirs.pretrained_cfg["mean"]
    assert ours.preprocessing.eval_crop_fraction == 0.93


@pytest.mark.parametrize("name", ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_a_bare_file_needs_only_its_heads(tmp_path: Path, name: str) -> None:
    """Its width of 32 is of no known model. Positions are resampled to another image size."""
    theirs, path = shaken(timm.create_model(name, **TIMM)), str(tmp_path / "bare.safetensors")
    save_file(theirs.state_dict(), path)
    with pytest.raises(UserError, match="set model.num_heads"):
        open_model(path)
    chosen = ViTSettings(num_heads=4)
    ours = open_model(path, model=chosen)
    with torch.no_grad():
        check(ours, theirs(IMAGES))
    assert "assumed gelu=erf, layer_norm_eps=1e-06, mean=(0.485" in ours.source
    larger = open_model(
        path,
        model=ViTSettings(num_heads=4, gelu="tanh"),
        preprocessing={"mean": (0.5,) * 3},
        image_size=2 * SIZE,
        position_embedding="dinov2",
    )
    assert "assumed layer_norm_eps=1e-06, std=" in larger.source
    assert larger.preprocessing.mean == (0.5,) * 3
    assert larger.preprocessing.image_size == 2 * SIZE and larger.arch.grid == (8, 8)
    assert larger.network(torch.zeros(2, 3, 2 * SIZE, 2 * SIZE)).shape == (2, 5)
    with pytest.raises(UserError, match="30 px is not a multiple of the 7 px patch"):
        open_model(path, model=chosen, image_size=30)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = timm.create_model(TINY, **TIMM | {"embed_dim": 192, "depth": 1})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_what_is_no_model_is_one_error(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(UserError, match=r"holds no model") as caught:
        open_model(str(tmp_path))
    assert "set init to the file model.safetensors" in str(caught.value)
    assert "config.json" in str(caught.value) and "checkpoints/" in str(caught.value)
    (tmp_path / "run.npz/checkpoints").mkdir(parents=True)  # a folder, whatever its name
    with pytest.raises(UserError, match="run.npz: "):
        open_model(str(tmp_path / "run.npz"))
    (tmp_path / "model.ckpt").write_text("")
    with pytest.raises(UserError, match=r"'?.ckpt'? is no kind of weight file"):
        open_model(str(tmp_path / "model.ckpt"))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "swin"}, "describes a model of type 'swin'"),
        ({"model_type": "vit", "num_attention_heads": 3, "hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"architecture": "resnet50"}, "tensors do not fit"),
        ({"architecture": TINY, "model_args": {"checkpoint_path": "/x"}}, "loads weights"),
    ],
)
def test_configs_of_other_models_are_refused(
    weights: Path, config: dict[str, Any], message: str
) -> None:
    (weights.parent / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        open_model(str(weights.parent))


@pytest.mark.parametrize(
    "name, message",
    [
        ("blocks.0.attn.q_norm.weight", "q_norm.weight: model not in(?s:.*)or model.name=timm"),
        ("layer1.0.conv1.weight", "layer1.0.conv1.weight: model not in this model"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    model = timm.create_model(TINY, **TIMM | {"embed_dim": 192, "depth": 1})
    path = tmp_path / "model.safetensors"
    save_file({**model.state_dict(), name: torch.ones(9)}, path)
    with pytest.raises(UserError, match=message):
        open_model(str(path))
