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


def test_positions_are_resized_to_the_grid_of_the_images(tmp_path: Path) -> None:
    init = weight_file(tmp_path)
    own = load_model(run_of(init))
    larger = load_model(run_of(init, image_size=32, position_embedding="dinov2"))
    assert larger.arch.grid == (8, 8) and larger.preprocessing.image_size == 32
    assert larger.network(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    assert larger.network.pos_embed.shape[1] == 4 * (own.network.pos_embed.shape[1] - 1) + 1
    with pytest.raises(UserError, match="10 px is not a multiple of the 4 px patch"):
        load_model(run_of(init, image_size=10))
