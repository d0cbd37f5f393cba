"""Tiny ViTs with random weights, as evaluations and pictures read them."""

from __future__ import annotations

from typing import Any

import torch

from vitscale.distributed.world import World
from vitscale.evaluation.trained_model import InferenceModel
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model

CPU = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
SMALL = {"width": 24, "depth": 1, "num_heads": 2, "mlp_width": 48}


def inference_model(*, seed: int = 0, **model: Any) -> InferenceModel:
    """`model`: keys of the section `model`. By default 16 px in patches of 4 px."""
    values = {**SMALL, "image_size": 16, "patch_size": 4, **model}
    settings = ViTSettings.model_validate(values)
    network = build_model(settings.resolved(num_classes=0), seed=seed)
    return InferenceModel(network, mean=(0.5,) * 3, std=(0.5,) * 3, world=CPU)  # type: ignore[arg-type]  # three


def random_images(count: int, *, size: int = 16, seed: int = 0) -> torch.Tensor:
    """uint8 [count, 3, size, size]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
