"""Small models with random weights in every tensor, as a script would have loaded and exported."""

from collections.abc import Callable
from pathlib import Path

import torch

from finetune.exporting.folder import write_folder
from finetune.settings import ExportRun
from tests.support.tables import Values
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel
from vitscale.models.registry import MODELS

SIZES = {
    "vit": {
        "image_size": 16,
        "patch_size": 4,
        "width": 24,
        "depth": 2,
        "num_heads": 3,
        "mlp_width": 40,
    },
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
    network = MODELS[family].load().build_model(arch, seed=0).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            # Initial values are 0 and 1 in many places, where an exchange would not show.
            parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return TrainedModel(
        network=network,
        arch=arch,
        preprocessing=Preprocessing(
            image_size=arch.image_size, **(preprocessing or {})
        ),
        classes=classes,
        source=f"a small {family}",
    )


def export(model: TrainedModel, to, folder: Path) -> Path:
    list(write_folder(ExportRun(init="x", to=to, output=str(folder)), model))
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
    if isinstance(network, torch.nn.Module):
        network.eval()
    return float(
        (network(images_of(model)) - model.network(images_of(model))).abs().max()
    )
