"""The head of SimCLR and its loss, over the views of all ranks.

Source: Chen et al. 2020, section 2.1 and equation 1. N views of this rank, in pairs of the same
image; M views of all ranks; D width of the features, E of the projection.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vitscale.distributed.world import gather_with_gradients
from vitscale.models.vit import ViT


class Projection(nn.Module):
    """Features [N, D] of images to [N, E], through one hidden layer of the same width."""

    def __init__(self, width: int, projection_width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, projection_width)

    def forward(self, vit: ViT, images_N3SS: torch.Tensor) -> torch.Tensor:
        features_ND = vit(images_N3SS, output="features")
        projected_NE: torch.Tensor = self.last(F.relu(self.hidden(features_ND)))
        return projected_NE


def contrastive_loss(
    projected_NE: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each view's partner among the views of all ranks, mean over this rank's.

    Returns the share of views that are nearest to their partner, too. Computed in fp32. Collective.
    """
    own_NE = F.normalize(projected_NE.float(), dim=1)
    all_ME = gather_with_gradients(own_NE)
    cosines_NM = own_NE @ all_ME.T / temperature

    # A view is not compared with itself, and its partner is its neighbour.
    num_views = len(own_NE)
    own_N = torch.arange(num_views, device=own_NE.device) + dist.get_rank() * num_views
    logits_NM = cosines_NM.scatter(1, own_N[:, None], -torch.inf)
    partner_N = own_N ^ 1

    is_nearest_N = logits_NM.argmax(dim=1) == partner_N
    return F.cross_entropy(logits_NM, partner_N), is_nearest_N.float().mean()
