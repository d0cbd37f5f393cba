"""AdamW with its first moment kept in bf16.

Owns: the update. Leaves out: AdamW in fp32, which is torch's own (`optimizer`).
"""

from __future__ import annotations

from typing import Any

import torch

from vitscale.optim.masked_adam import MaskedAdam


class Bf16MomentumAdamW(MaskedAdam):
    """Loshchilov & Hutter 2019, algorithm 2, with 6 bytes of moments per value instead of 8.

    As optax's `scale_by_adam(mu_dtype="bfloat16")`, which big_vision's ViT recipes use: all is
    computed in fp32, the update takes the moment before it is rounded, and the rounded one is kept.
    """

    state_dtypes = {"exp_avg": torch.bfloat16}

    def _changed(
        self, parameter: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        return parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction
