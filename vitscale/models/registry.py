"""The model families. Needs no torch.

A new family is one entry of `MODELS`. The code that builds it needs torch and is imported only
when a model is built; its settings and costs need none, since a login node may have none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitscale.config.section import choice_of
from vitscale.models.hybrid import costs as hybrid_costs
from vitscale.models.hybrid.settings import HybridSettings
from vitscale.models.interface.settings import ModelSettingsBase
from vitscale.models.resnet import costs as resnet_costs
from vitscale.models.resnet.settings import ResNetSettings
from vitscale.models.vit import costs as vit_costs
from vitscale.models.vit.settings import ViTSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """A family's settings, where its code is, and what its models cost.

    The costs take the architecture that the settings resolve to.
    """

    Settings: type[ModelSettingsBase]
    code: str
    """Module with the functions `build_model`, `decayed`, `layers_above`, `checkpoint_activations`
    and `compile_blocks`; those of `vit.model` say what each does."""
    num_parameters: Callable[[Any], int]
    train_flops_per_image: Callable[[Any], int]
    activation_bytes_per_image: Callable[..., int]

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


MODELS = {
    "vit": ModelFamily(
        Settings=ViTSettings,
        code="vitscale.models.vit.model",
        num_parameters=vit_costs.num_parameters,
        train_flops_per_image=vit_costs.train_flops_per_image,
        activation_bytes_per_image=vit_costs.activation_bytes_per_image,
    ),
    "hybrid": ModelFamily(
        Settings=HybridSettings,
        code="vitscale.models.hybrid.model",
        num_parameters=hybrid_costs.num_parameters,
        train_flops_per_image=hybrid_costs.train_flops_per_image,
        activation_bytes_per_image=hybrid_costs.activation_bytes_per_image,
    ),
    "bit_resnet": ModelFamily(
        Settings=ResNetSettings,
        code="vitscale.models.resnet.model",
        num_parameters=resnet_costs.num_parameters,
        train_flops_per_image=resnet_costs.train_flops_per_image,
        activation_bytes_per_image=resnet_costs.activation_bytes_per_image,
    ),
}

if TYPE_CHECKING:
    ModelSettings = ModelSettingsBase
else:
    ModelSettings = choice_of(MODELS, default="vit")
