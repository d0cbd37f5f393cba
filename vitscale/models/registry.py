"""The model families. Needs no torch.

A new family is one entry of `MODELS`. The code that builds it needs torch and is imported only
when a model is built; its costs need none, since a login node may have none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitscale.models import vit_costs
from vitscale.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """Where a family's code is, and what its models cost."""

    code: str
    """Module with the functions `build_model`, `decayed`, `layers_above`,
    `checkpoint_activations` and `compile_blocks`; those of `vit` say what each does."""
    num_parameters: Callable[[Architecture], int]
    train_flops_per_image: Callable[[Architecture], int]
    activation_bytes_per_image: Callable[..., int]

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


MODELS = {
    "vit": ModelFamily(
        code="vitscale.models.vit",
        num_parameters=vit_costs.num_parameters,
        train_flops_per_image=vit_costs.train_flops_per_image,
        activation_bytes_per_image=vit_costs.activation_bytes_per_image,
    ),
}
