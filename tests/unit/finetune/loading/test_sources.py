"""What `init=` names, what is said about it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from finetune.run import FinetuneRun
from finetune.settings import ModelRun
from finetune.start import load_initial_weights
from vitscale.config.errors import UserError
from vitscale.evaluation.trained_model import open_model
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model

TINY = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 192, "depth": 1}
SMALL |= {"num_heads": 3, "mlp_width": 16}


def state(num_classes: int = 4, **changes: Any) -> dict[str, torch.Tensor]:
    settings = ViTSettings.model_validate({**SMALL, **changes})
    model = build_model(settings.resolved(num_classes=num_classes), seed=0)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if num_classes:
        found["head.weight"] = torch.arange(float(num_classes))[:, None].repeat(1, 192)
    return found


def finetune(init: Path, shards: Path, **keys: Any) -> FinetuneRun:
    values: dict[str, Any] = {"name": "x", "init": str(init), "model": SMALL}
    values["data"] = {"path": str(shards), "global_batch": 64}
    values |= {"optim": {"lr": 0.1}, "schedule": {"steps": 1}}
    return FinetuneRun.model_validate({**values, **keys})


def start(run: FinetuneRun, num_classes: int = 2) -> tuple[list[str], torch.nn.Module]:
    arch = run.model.resolved(num_classes=num_classes)
    model = build_model(arch, seed=1)  # type: ignore[arg-type]  # a ViT's
    return load_initial_weights(model, arch, run), model


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_what_is_no_model_is_one_error(tmp_path: Path, weights: Path) -> None:
    with pytest.raises(UserError, match=r"holds no model") as caught:
        open_model(**ModelRun(init=str(tmp_path)).source())
    assert "set init to the file model.safetensors" in str(caught.value)
    assert "config.json" in str(caught.value) and "checkpoints/" in str(caught.value)
    (tmp_path / "model.ckpt").write_text("")
    with pytest.raises(UserError, match=r"'?.ckpt'? is no kind of weight file"):
        open_model(**ModelRun(init=str(tmp_path / "model.ckpt")).source())


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
        open_model(**ModelRun(init=str(weights.parent)).source())


@pytest.mark.parametrize(
    "names, message",
    [
        ({"norm_pre.weight": (192,)}, "a norm before the blocks, as CLIP has"),
        ({"blocks.0.attn.q_norm.weight": (64,)}, "norms of queries and keys"),
        ({"blocks.0.attn.relative_position_bias_table": (9, 3)}, "as BEiT has"),
        ({"layers.0.blocks.0.norm1.weight": (9,)}, "as Swin has"),
        ({"layer1.0.conv1.weight": (9,)}, "stages of convolutions"),
        ({"blocks.0.attn.lora.weight": (9,)}, "blocks.0.attn.lora.weight: model not in this model"),
    ],
)
def test_other_families_are_refused_by_name(
    tmp_path: Path, names: dict[str, Any], message: str
) -> None:
    more = {name: torch.ones(shape) for name, shape in names.items()}
    save_file(state() | more, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        open_model(**ModelRun(init=str(tmp_path / "model.safetensors")).source())


def test_assumptions_are_said_and_can_be_replaced(weights: Path) -> None:
    loaded = open_model(**ModelRun(init=str(weights)).source())
    assert "assumed gelu=erf, layer_norm_eps=1e-06, mean=(0.485" in loaded.source
    assert loaded.settings.gelu == "erf" and loaded.arch.num_heads == 3  # type: ignore[attr-defined]  # a ViT's
    half = {"mean": [0.5] * 3, "eval_resize": "squash"}
    run = ModelRun.model_validate(
        {"init": str(weights), "model": {"gelu": "tanh"}, "preprocessing": half}
    )
    loaded = open_model(**run.source())
    assert "assumed layer_norm_eps=1e-06, std=" in loaded.source
    assert loaded.preprocessing.mean == (0.5,) * 3 and loaded.preprocessing.eval_resize == "squash"
    assert loaded.preprocessing.eval_interpolation == "bicubic"


def test_training_says_what_the_weights_expect(weights: Path, tmp_path: Path) -> None:
    said, model = start(finetune(weights, tmp_path))
    assert said[0] == f"starting from {weights}, timm's names"
    assert "these weights probably expect model.gelu=erf; this run has tanh" in said
    assert any("data.mean=[0.485, 0.456, 0.406]; this run has [0.5" in line for line in said)
    assert torch.equal(model.get_parameter("cls_token"), state()["cls_token"])


def test_misfits_name_the_keys_that_would_fit(tmp_path: Path) -> None:
    other = state(pool="gap", pool_norm=True, layer_scale=0.1, mlp_width=24)
    np.savez(tmp_path / "model.npz", **{name: value.numpy() for name, value in other.items()})
    run = finetune(tmp_path / "model.npz", tmp_path)
    model = build_model(run.model.resolved(num_classes=2), seed=1)  # type: ignore[arg-type]  # a ViT's
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="tensors do not fit") as caught:
        load_initial_weights(model, run.model.resolved(num_classes=2), run)
    advice = caught.value.next_step
    assert advice is not None and advice.startswith("these weights need ")
    assert {"model.mlp_width=24", "model.pool=gap", "model.pool_norm=true"} <= set(advice.split())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_is_applied_at_another_image_size(weights: Path) -> None:
    """The grid of its positions becomes that of the images."""
    own = open_model(str(weights))
    larger = open_model(str(weights), image_size=16, position_embedding="dinov2")
    assert larger.arch.grid == (4, 4) and larger.preprocessing.image_size == 16
    assert larger.network(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
    assert larger.network.get_parameter("pos_embed").shape == (1, 17, 192)
    assert own.network.get_parameter("pos_embed").shape == (1, 5, 192)
    with pytest.raises(UserError, match="10 px is not a multiple of the 4 px patch"):
        open_model(str(weights), image_size=10)
