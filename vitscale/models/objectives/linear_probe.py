"""A linear classifier on the features of a frozen model."""

from __future__ import annotations

import torch
from torch import nn

VARIANCE_EPS = 1e-6


class Standardize(nn.Module):
    """Subtract the mean of each feature and divide by its deviation; both are measured once.

    A BatchNorm without parameters whose statistics are those of the training set.
    """

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, features_BD: torch.Tensor) -> torch.Tensor:
        centred_BD = features_BD.float() - self.mean
        return centred_BD * (self.variance + VARIANCE_EPS).rsqrt()


def freeze_trunk(model: nn.Module) -> None:
    """Make every parameter but the head's a buffer, and standardise what the head sees.

    Buffers keep their names. They have no gradient and no optimiser state, at any ZeRO stage.
    """
    head = model.head
    assert isinstance(head, nn.Linear)
    model.head = nn.Identity()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    model.head = nn.Sequential(Standardize(head.in_features), head)
