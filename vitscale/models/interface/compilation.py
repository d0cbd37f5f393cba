"""Compile the blocks of a model one by one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from timm.layers import DropPath
from torch import nn

# Of one function: training, evaluation, recomputation, each output that is asked for; with and
# without drop path; blocks of an objective's own width.
MAX_VARIANTS = 32
RATE_UNITS = 2**24


def compile_each(blocks: Iterable[nn.Module], *, backend: str) -> None:
    """Compile each block in place, when it is first used; names and weights stay as they are.

    Blocks that differ in their weights and in the rate of drop path alone share what is compiled.
    """
    dynamo = torch._dynamo.config
    # Beyond it torch silently stops compiling.
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    for block in blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, DropPath):
                block.set_submodule(name, SharedDropPath(module.drop_prob))
        block.compile(dynamic=False, backend=backend)


class SharedDropPath(nn.Module):
    """timm's drop path with its rate in a tensor: torch compiles a number into the code."""

    rate: torch.Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        # An integer, which is not rounded when a model is cast to bf16.
        units = torch.tensor(round(rate * RATE_UNITS), dtype=torch.int32)
        self.register_buffer("rate", units, persistent=False)

    def forward(self, tokens_BTD: torch.Tensor) -> torch.Tensor:
        """Set some samples to 0 and divide the others by the share kept, in training."""
        if not self.training:
            return tokens_BTD
        keep = 1 - self.rate.float() / RATE_UNITS
        shape = (tokens_BTD.shape[0],) + (1,) * (tokens_BTD.ndim - 1)
        mask_B11 = (torch.rand(shape, device=tokens_BTD.device) < keep) / keep
        return tokens_BTD * mask_B11.to(tokens_BTD.dtype)
