"""SIGReg and the projector of LeJEPA, over the images of all ranks.

Source: Balestriero & LeCun 2025, section 4 and algorithm 1. V views, B images of this rank, E width
of the embeddings, D directions, T knots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vitscale.distributed.world import sum_over_ranks, sum_with_gradients
from vitscale.models.vit import ViT

NORM_EPS = 1e-5
# The characteristic functions are compared at these points, as far on either side of 0.
NUM_KNOTS = 17
LAST_KNOT = 5.0


class GlobalNorm(nn.Module):
    """Batch normalisation over the rows of all ranks.

    It keeps no running statistics: these would be a state that differs between ranks, and no
    evaluation passes through it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, rows_NX: torch.Tensor) -> torch.Tensor:
        wide_NX = rows_NX.float()
        num_rows = len(rows_NX) * dist.get_world_size()
        mean_X = sum_with_gradients(wide_NX.sum(dim=0)) / num_rows
        centered_NX = wide_NX - mean_X
        variance_X = sum_with_gradients(centered_NX.square().sum(dim=0)) / num_rows
        scaled_NX = centered_NX * (variance_X + NORM_EPS).rsqrt()
        return (scaled_NX * self.weight + self.bias).to(rows_NX.dtype)


class Projector(nn.Module):
    """Features of images through linear layers, with a norm and ReLU between them."""

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: of the features, of each hidden layer and of the output."""
        super().__init__()
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths[:-1]):
            # The norm takes away what a bias would add.
            layers.append(nn.Linear(width, next_width, bias=False))
            layers += [GlobalNorm(next_width), nn.ReLU()]
        layers.append(nn.Linear(widths[-2], widths[-1]))
        self.layers = nn.Sequential(*layers)

    def forward(self, vit: ViT, images_N3SS: torch.Tensor) -> torch.Tensor:
        embedded_NE: torch.Tensor = self.layers(vit(images_N3SS, output="features"))
        return embedded_NE


def directions(width: int, num: int, *, key: int) -> torch.Tensor:
    """Unit vectors [width, num], a function of the key: the same on all ranks and devices."""
    random = torch.Generator().manual_seed(key >> 1)
    return F.normalize(torch.randn(width, num, generator=random), dim=0)


def sigreg(embedded_VBE: torch.Tensor, directions_ED: torch.Tensor) -> torch.Tensor:
    """How far the embeddings of a view are from a standard normal distribution; mean over views.

    The Epps-Pulley statistic of the projections on each direction, averaged over the directions:
    N times the integral of |mean of exp(i t x) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) over t from -5 to
    5, for the N images of all ranks. About 1 for normal ones. Collective, and so is its backward
    pass.
    """
    num_images = embedded_VBE.shape[1] * dist.get_world_size()
    # The integral is twice that of its right half, of an even function.
    knots_T = torch.linspace(
        0, LAST_KNOT, NUM_KNOTS // 2 + 1, device=embedded_VBE.device
    )
    normal_T = torch.exp(-knots_T.square() / 2)

    angles_VBDT = (embedded_VBE @ directions_ED)[..., None] * knots_T
    sums_VDT = torch.stack([angles_VBDT.cos().sum(dim=1), angles_VBDT.sin().sum(dim=1)])
    cos_VDT, sin_VDT = sum_with_gradients(sums_VDT) / num_images

    gaps_VDT = (cos_VDT - normal_T).square() + sin_VDT.square()
    statistic_VD = 2 * torch.trapezoid(gaps_VDT * normal_T, knots_T)
    return num_images * statistic_VD.mean()


@torch.no_grad()
def spread(features_BD: torch.Tensor) -> torch.Tensor:
    """How far the directions of features differ over the images of all ranks; scalar.

    1 less the squared length of their mean direction: 0 if all are one, about 1 if they point
    everywhere. Collective.
    """
    unit_BD = F.normalize(features_BD.float(), dim=1)
    num_images = len(unit_BD) * dist.get_world_size()
    mean_D = sum_over_ranks(unit_BD.sum(dim=0)) / num_images
    return 1 - mean_D.square().sum()
