"""SGD with momentum: torch's own."""

from __future__ import annotations

from typing import Any

import torch

from vitscale.optim.settings import OptimSettings


def build(groups: list[dict[str, Any]], settings: OptimSettings, *, fused: bool) -> torch.optim.SGD:
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=fused)
