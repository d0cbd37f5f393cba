"""Choose the kernels of scaled dot-product attention on a GPU."""

from __future__ import annotations

import torch

BACKENDS = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}


def use_attention(name: str) -> None:
    """Allow one of `BACKENDS` alone in this process, or all with `auto`, as torch starts."""
    for each, enable in BACKENDS.items():
        enable(name in (each, "auto"))
