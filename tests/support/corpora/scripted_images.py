"""A small picture, and random numbers that are given."""

from __future__ import annotations

import torch

from vitscale.distributed.random_numbers import CounterRandom

HALF = (0.5, 0.5, 0.5)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Scripted(CounterRandom):
    """Returns prepared fractions of the requested range."""

    def __init__(self, *shares: float) -> None:
        super().__init__(0)
        self.shares = list(shares)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * self.shares.pop(0)


def photo(size: int = 48, seed: int = 0) -> torch.Tensor:
    coarse = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) * 300 - 20
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    return fine.clamp(0, 255).byte()[0]
