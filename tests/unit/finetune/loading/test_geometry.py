"""A model applied at another image size than its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.loading.loaded_model import load_model
from finetune.loading.settings import ModelRun
from vitscale.config.errors import UserError
from vitscale.models.registry import MODELS

SMALL = {"name": "vit", "image_size": 16, "patch_size": 4, "width": 24, "depth": 1, "num_heads": 2}
SMALL |= {"mlp_width": 40}


def weight_file(folder: Path) -> str:
    family = MODELS["vit"]
    settings = family.Settings.model_validate(SMALL)
    model = family.load().build_model(settings, settings.architecture(num_classes=5), seed=0)
    path = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return str(path)


def run_of(init: str, **changes: object) -> ModelRun:
    return ModelRun.model_validate({"init": init, "model": SMALL, **changes})


def test_a_square_model_is_applied_to_wide_images(tmp_path: Path) -> None:
    """The grid of its positions becomes that of the images; a square is one number again."""
    init = weight_file(tmp_path)
    wide = load_model(run_of(init, image_size=[8, 32], position_embedding="dinov2"))
    assert wide.arch.grid == (2, 8) and wide.preprocessing.image_size == (8, 32)
    assert wide.network(torch.zeros(2, 3, 8, 32)).shape == (2, 5)
    own, square = load_model(run_of(init)), load_model(run_of(init, image_size=[16, 16]))
    assert wide.network.pos_embed.shape == own.network.pos_embed.shape
    assert not torch.allclose(wide.network.pos_embed, own.network.pos_embed)
    assert square.arch == own.arch and square.preprocessing == own.preprocessing
    with pytest.raises(UserError, match="10 px is not a multiple of the 4 px patch"):
        load_model(run_of(init, image_size=[16, 10]))
