"""Compile the blocks of a model one by one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


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
