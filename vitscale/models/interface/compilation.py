"""Compile the blocks of a model one by one, or its forward pass as one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# Of one forward pass: in training, in evaluation, and of each output that is asked for.
MAX_VARIANTS = 32


def compile_each(blocks: Iterable[nn.Module], *, backend: str) -> None:
    """Compile each block in place, when it is first used; names and weights stay as they are.

    Equal blocks share what is compiled. Those with drop path of their own rates do not, and
    training, evaluation and recomputation each are compiled once: hence the higher limit, beyond
    which torch silently stops compiling.
    """
    dynamo = torch._dynamo.config
    each = list(blocks)
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(each))
    for block in each:
        block.compile(dynamic=False, backend=backend)


def compile_forward(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile a model's forward pass as one, when it is first used; names stay as they are.

    Not its `__call__`: DeepSpeed's hooks there count steps in Python.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    model.forward = torch.compile(model.forward, dynamic=False, backend=backend)
