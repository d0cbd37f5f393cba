"""Run a trained model outside training: whole on every rank, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vitscale.distributed.world import World
from vitscale.evaluation.models.preprocessing import Normalization


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
        self._world, self.dtype = world, dtype
        self._normalize = Normalization(mean=mean, std=std, device=world.device)

    @property
    def world(self) -> World:
        return self._world

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] on the device, uint8 or float 0..255 -> fp32 [B, classes]."""
        return self._forward(images_B3SS, "logits")[0]

    def features(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """What the head sees, fp32 [B, width]."""
        return self._forward(images_B3SS, "features")[0]

    def heads(self, images_B3SS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the class and of the distillation head."""
        class_BC, distillation_BC = self._forward(images_B3SS, "heads")
        return class_BC, distillation_BC

    @property
    def known_outputs(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.network.known_outputs  # type: ignore[assignment]  # any module
        return names

    @torch.no_grad()
    def forward(self, images_B3SS: torch.Tensor, output: str, **inputs: Any) -> Any:
        """Another output of the model, with further inputs if it takes them, in its precision."""
        device = self._world.device
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.network(self._normalize(images_B3SS), output=output, **inputs)

    def _forward(self, images_B3SS: torch.Tensor, output: str) -> tuple[torch.Tensor, ...]:
        found = self.forward(images_B3SS, output)
        each = found if isinstance(found, tuple) else (found,)
        return tuple(values.float() for values in each)
