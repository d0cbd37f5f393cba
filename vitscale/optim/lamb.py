"""LAMB: Adam's update, scaled in every tensor to the norm of the tensor itself.

Needs whole tensors: ZeRO 1 to 3 give an optimiser flat slices of many tensors together, and the
norms would be those of slices. `optim.settings` refuses that.
"""

from __future__ import annotations

from typing import Any

import torch

from vitscale.optim.masked_adam import MaskedAdam
from vitscale.optim.settings import OptimSettings


def build(groups: list[dict[str, Any]], settings: OptimSettings, *, fused: bool) -> Lamb:
    return Lamb(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


class Lamb(MaskedAdam):
    """You et al. 2020 (Large Batch Optimization for Deep Learning), algorithm 2, phi the identity.

    As in the fused LAMB of apex that DeiT-III used (`multi_tensor_lamb.cu` with `use_nvlamb` false,
    the default), groups without weight decay (biases, norms, layer scales) take Adam's plain step,
    and so does a tensor whose norm or whose update is zero (a fresh head). Unlike it, clipping of
    the global norm, at 1 there, is not built in: see `optim.clip_norm`.
    """

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
            size = torch.linalg.vector_norm(parameter)
            change = torch.linalg.vector_norm(direction)
            # Both sides are computed on the device: asking the host would stop it at every tensor.
            direction.mul_(torch.where((size > 0) & (change > 0), size / change, 1.0))
        return direction.mul_(-group["lr"]).add_(parameter)
