"""Initial values that several families share."""

from __future__ import annotations

import torch
from torch import nn

# Standard deviation of a unit normal that is cut at plus and minus 2.
CUT_NORMAL_STD = 0.87962566103423978


def lecun_normal(weight: torch.Tensor, random: torch.Generator) -> None:
    """Flax's default for kernels: truncated at 2 sigma, variance 1 / fan-in."""
    std = weight[0].numel() ** -0.5 / CUT_NORMAL_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=random)
