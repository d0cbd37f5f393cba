"""The optimisers. Needs no torch.

A new optimiser is one file with a function `build` and one entry of `OPTIMIZERS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """Where an optimiser's code is, and what it keeps from step to step."""

    code: str
    """Module with `build(groups, settings, *, fused)`; imported when a run trains."""
    settings: tuple[str, ...]
    """Keys of `optim` that not every optimiser has; another optimiser refuses them."""
    state_names: tuple[str, ...]
    """Tensors it keeps for each parameter, of the parameter's shape."""
    bytes_per_parameter: int
    """Of these tensors together; 4 for each in fp32."""
    counts_steps: bool
    """Whether it also keeps `step`, the number of updates."""
    needs_whole_tensors: bool = False
    """Whether it needs norms of whole tensors, which ZeRO 1 to 3 shard."""

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


OPTIMIZERS = {
    "adamw": OptimizerKind(
        code="vitscale.optim.adamw",
        settings=("betas", "eps", "momentum_dtype", "weight_decay_mode"),
        state_names=("exp_avg", "exp_avg_sq"),
        bytes_per_parameter=8,
        counts_steps=True,
    ),
    "sgd": OptimizerKind(
        code="vitscale.optim.sgd",
        settings=("momentum",),
        state_names=("momentum_buffer",),
        bytes_per_parameter=4,
        counts_steps=False,
    ),
    "lamb": OptimizerKind(
        code="vitscale.optim.lamb",
        settings=("betas", "eps"),
        state_names=("exp_avg", "exp_avg_sq"),
        bytes_per_parameter=8,
        counts_steps=True,
        needs_whole_tensors=True,
    ),
}
