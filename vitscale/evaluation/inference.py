"""Run a trained model outside training, on images prepared as it expects them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.engine.device_batches import Normalization


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """The evaluation's resize, crop and normalisation; fields are named as in `DataSettings`."""

    image_size: int
    """Pixels a side of the model's input."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    eval_resize: str = "squash"
    eval_crop_fraction: float = 0.875
    """center_crop only: image size / resized short side."""
    eval_interpolation: str = "bilinear"
    eval_antialias: bool = True

    def data_values(self) -> dict[str, Any]:
        """The same as values of `DataSettings`, which leaves the image size to the model."""
        values = asdict(self)
        del values["image_size"]
        return values


def preprocessing_of(data: DataSettings, *, image_size: int) -> Preprocessing:
    """The preprocessing of a run's evaluations."""
    names = [each.name for each in fields(Preprocessing) if each.name != "image_size"]
    values = {name: getattr(data, name) for name in names}
    values["eval_interpolation"] = data.eval_interpolation or data.interpolation
    return Preprocessing(image_size=image_size, **values)


class InferenceModel:
    """A model in eval mode, with the outputs that evaluations read.

    Ranks share images, not weights: no method is collective.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        world: World,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: below fp32 the fp32 weights are rounded where they multiply."""
        self.network = network.eval().requires_grad_(False).to(world.device)
        self.world, self.dtype = world, dtype
        self._normalize = Normalization(mean=mean, std=std, device=world.device)

    @property
    def known_outputs(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.network.known_outputs  # type: ignore[assignment]  # any module
        return names

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] on the device, uint8 or float 0..255 -> fp32 [B, classes]."""
        logits_BC: torch.Tensor = self.forward(images_B3SS, "logits").float()
        return logits_BC

    @torch.no_grad()
    def forward(self, images_B3SS: torch.Tensor, output: str) -> Any:
        """Another output of the model, in its precision."""
        device = self.world.device
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.network(self._normalize(images_B3SS), output=output)
