"""What is inferred of a model that no file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vitscale.models.weights.inferred import inferred_model
from vitscale.models.weights.reading import read_weights


def bare_file(folder: Path, *, width: int, rows: int = 1, columns: int = 1) -> Path:
    """One block with an MLP of 8 channels, patches of 2 px, without a head."""
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + rows * columns, width),
        "patch_embed.proj.weight": (width, 3, 2, 2),
        "blocks.0.norm1.weight": (width,),
        "blocks.0.mlp.fc1.weight": (8, width),
        "blocks.0.mlp.fc2.weight": (width, 8),
    }
    path = folder / "bare.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path


# ViT and DeiT; SigLIP's So400m, H, g and G have wider heads; DINOv2's g; any other of 64 channels.
@pytest.mark.parametrize(
    ("width", "heads"),
    [(192, 3), (768, 12), (1024, 16), (1152, 16), (1280, 16), (1408, 16), (1536, 24), (1664, 16)]
    + [(640, 10)],
)
def test_heads_are_those_of_the_known_model(tmp_path: Path, width: int, heads: int) -> None:
    path = bare_file(tmp_path, width=width)
    settings: Any
    settings, classes = inferred_model(read_weights(path, grid=None), chosen=None, path=path)
    assert (settings.num_heads, settings.width, classes) == (heads, width, 0)
