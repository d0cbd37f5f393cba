"""The cache of features that `features.cache` names, for one model."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import blake3
import torch
from torch import nn

from finetune.inference.settings import EvaluateRun
from finetune.loading.loaded_model import LoadedModel
from vitscale.distributed.world import World
from vitscale.evaluation.features.cache import FeatureCache


def feature_cache(
    run: EvaluateRun, loaded: LoadedModel, world: World, *, dtype: torch.dtype
) -> FeatureCache | None:
    """None where the run has none. Raises UserError when its folder cannot be written."""
    if run.features.cache is None:
        return None

    def say(text: str) -> None:
        if world.is_first:
            print(f"features: {text}", file=sys.stderr, flush=True)

    return FeatureCache(
        Path(run.features.cache),
        made_by={
            "weights": weights_fingerprint(loaded.network),
            "model": loaded.settings.model_dump(mode="json"),
            "architecture": loaded.arch.description(),
            "preprocessing": asdict(loaded.preprocessing),
            "precision": str(dtype),
        },
        images_per_file=run.features.images_per_file,
        say=say,
    )


def weights_fingerprint(network: nn.Module) -> str:
    """BLAKE3 over names, shapes, types and bytes of all parameters and buffers."""
    digest = blake3.blake3()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
