"""The last layer of a classifier, in fp32 whatever the precision of the model before it.

Logits near a bias of -10, where the sigmoid over 21,843 classes starts, are 0.06 apart in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class InFp32:
    """Multiplies in fp32, outside of autocast.

    An engine that rounds parameters sets `remainders`: for each parameter by name what rounding
    took from it. The layer adds it, so it uses the weights that the optimiser updates.
    """

    remainders: Mapping[str, torch.Tensor] = {}

    def _logits(
        self, features_BD: torch.Tensor, weight_CD: torch.Tensor, bias_C: torch.Tensor | None
    ) -> torch.Tensor:
        assert bias_C is not None
        device = features_BD.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._logits(features_BD, weight_CD, bias_C)
        dtype = torch.promote_types(features_BD.dtype, torch.float32)
        return nn.functional.linear(
            features_BD.to(dtype),
            self._whole("weight", weight_CD, dtype).flatten(1),
            self._whole("bias", bias_C, dtype),
        )

    def _whole(self, name: str, rounded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        remainder = self.remainders.get(name)
        whole = rounded.to(dtype)
        return whole if remainder is None else whole + remainder


class Classifier(InFp32, nn.Linear):
    """Features [B, width] -> logits [B, classes]."""

    def forward(self, features_BD: torch.Tensor) -> torch.Tensor:
        return self._logits(features_BD, self.weight, self.bias)


class ConvClassifier(InFp32, nn.Conv2d):
    """Features [B, width, 1, 1] -> logits [B, classes, 1, 1]."""

    def forward(self, features_BD11: torch.Tensor) -> torch.Tensor:
        return self._logits(features_BD11.flatten(1), self.weight, self.bias)[..., None, None]


def classify_in_fp32(*lasts: nn.Module) -> None:
    """Make last layers fp32 ones in place; leaves what stands for no layer, such as Identity."""
    kinds = {nn.Linear: Classifier, nn.Conv2d: ConvClassifier}
    for last in lasts:
        if type(last) in kinds:
            last.__class__ = kinds[type(last)]
