"""Tiny ViTs with random weights, as evaluations and pictures read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from vitscale.checkpoint.commit import OneRank, Save, commit_save
from vitscale.checkpoint.tensors import HostCopy
from vitscale.distributed.world import World
from vitscale.evaluation.models.inference import InferenceModel
from vitscale.models.vit.model import build_model
from vitscale.models.vit.settings import ViTSettings

CPU = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
SMALL = {"width": 24, "depth": 1, "num_heads": 2, "mlp_width": 48}


def inference_model(*, seed: int = 0, **model: Any) -> InferenceModel:
    """`model`: keys of the section `model`. By default 16 px in patches of 4 px."""
    values = {**SMALL, "image_size": 16, "patch_size": 4, **model}
    settings = ViTSettings.model_validate(values)
    network = build_model(settings, settings.architecture(num_classes=0), seed=seed)
    return InferenceModel(network, mean=(0.5,) * 3, std=(0.5,) * 3, world=CPU)  # type: ignore[arg-type]  # three


def random_images(count: int, *, size: int = 16, seed: int = 0) -> torch.Tensor:
    """uint8 [count, 3, size, size]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def save_run(folder: Path, network: nn.Module, config: dict[str, Any], *, step: int = 3) -> None:
    """A run folder as the session leaves it: config.yaml and one checkpoint of `network`.

    config: the sections `model`, `data` and `objective`.
    """
    settings = ViTSettings.model_validate(config["model"])
    arch = settings.architecture(num_classes=0)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tensors = {f"model.{name}": value for name, value in network.state_dict().items()}
    copy = HostCopy(CPU.device)
    copy.prepare(tensors)
    save = Save(
        checkpoints=folder / "checkpoints",
        step=step,
        attempt="test",
        rank=0,
        keep=1,
        progress={},
        description={
            "architecture": arch.description(),
            "grid": list(arch.grid),
            "num_prefix_tokens": arch.num_prefix_tokens,
        },
    )
    commit_save(save, copy.take(tensors), exchange=OneRank())
