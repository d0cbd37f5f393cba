"""Small models with random weights in every tensor, as a script would have loaded and exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.folder import write_folder
from finetune.settings import ExportRun
from tests.support.tables import Values
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel
from vitscale.models.registry import MODELS

SIZES = {
    # No two sizes are equal, and width is no power of two: no exchange of axes goes unseen.
    "vit": {
        "image_size": 16,
        "patch_size": 4,
        "width": 24,
        "depth": 2,
        "num_heads": 3,
        "mlp_width": 40,
    },
    # No ViT, and the smallest that timm has.
    "timm": {"image_size": 32, "model": "test_convnext"},
}


def small_model(
    family: str = "vit",
    *,
    num_classes: int = 5,
    preprocessing: Values | None = None,
    classes: tuple[str, ...] | None = None,
    **settings,
) -> TrainedModel:
    """settings: values of `model`."""
    chosen = MODELS[family].Settings(**{**SIZES[family], **settings})
    assert not list(chosen.problems())
    arch = chosen.resolved(num_classes=num_classes)
    network = MODELS[family].load().build_model(arch, seed=0)
    # Not the size of the crop alone: a test may give mean, resampling and more.
    preprocessing = {"image_size": arch.image_size, **(preprocessing or {})}
    return TrainedModel(
        network=randomized(network).eval(),
        arch=arch,
        preprocessing=Preprocessing(**preprocessing),
        classes=classes,
        source=f"a small {family}",
    )


@torch.no_grad()
def randomized(model: torch.nn.Module, seed: int = 1) -> Any:
    """Move every tensor off its initial value, where decay or an exchange would not show."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return model


def export(model: TrainedModel, to, folder: Path) -> Path:
    run = ExportRun(init="x", to=to, output=str(folder))
    # It writes while it yields what it has to say, so all of it is asked for.
    list(write_folder(run, model))
    return folder


def images_of(model: TrainedModel, count: int = 2) -> torch.Tensor:
    size = model.arch.image_size
    random = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, size, size, generator=random)


@torch.no_grad()
def off_by(
    network: Callable[[torch.Tensor], torch.Tensor], model: TrainedModel
) -> float:
    """Largest difference between the logits of `network` and the model's (see `test_vit`)."""
    # Dropout and batch norm of a network from elsewhere; functions have no such mode.
    if isinstance(network, torch.nn.Module):
        network.eval()
    images = images_of(model)
    difference = network(images) - model.network(images)
    return float(difference.abs().max())
