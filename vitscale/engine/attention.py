"""Choose the kernels of scaled dot-product attention on a GPU."""

from __future__ import annotations

import torch
from torch.compiler import config as compiler_config

BACKENDS = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
USER_TAG = compiler_config.cache_key_tag


def use_attention(name: str) -> None:
    """Allow one of `BACKENDS` alone in this process, or all with `auto`, as torch starts."""
    for each, enable in BACKENDS.items():
        enable(name in (each, "auto"))
    # Compiled code holds its kernels, but the key of torch's cache on disk does not name them.
    tag = "" if name == "auto" else f" attention={name}"
    compiler_config.cache_key_tag = USER_TAG + tag
