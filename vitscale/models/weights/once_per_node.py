"""Load the weights that a run starts from: one rank of each node reads them, the others copy.

Leaves out: reading (`InitialWeights` of the stage), restoring a checkpoint (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from vitscale.distributed.node_share import Gather, once_per_node
from vitscale.models.interface.architecture import Architecture

# Loads weights into a fresh model; returns what to say about them.
InitialWeights = Callable[[nn.Module, Architecture], list[str]]


def load_once_per_node(
    model: nn.Module, arch: Architecture, load: InitialWeights, *, rank: int, gather: Gather
) -> list[str]:
    """`load` into a model on the CPU, the same on every rank. Collective.

    Returns what `load` says, and why a node shares nothing, if it does.
    Raises UserError, on all ranks, when `load` does on one.
    """
    has_loaded = False

    def read() -> tuple[dict[str, np.ndarray], list[str]]:
        nonlocal has_loaded
        messages, has_loaded = load(model, arch), True
        return {name: value.numpy() for name, value in _state(model).items()}, messages

    (arrays, messages), lines = once_per_node(read, rank=rank, gather=gather)
    if not has_loaded:
        with torch.no_grad():
            for name, value in _state(model).items():
                np.copyto(value.numpy(), arrays[name])
    return [*messages, *(f"starting weights: {line}" for line in lines)]


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}
