"""The model families. Needs no torch.

A new family is one entry of `MODELS`. The code that builds it needs torch and is imported only
when a model is built; its settings and formulas need none, since a login node may have none.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitscale.config.section import choice_of
from vitscale.models.interface.architecture import Architecture
from vitscale.models.interface.settings import ModelSettingsBase
from vitscale.models.timm_settings import TimmSettings
from vitscale.models.vit import costs as vit_costs
from vitscale.models.vit.settings import ViTSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """A family's settings, where its code is, and what its models cost."""

    Settings: type[ModelSettingsBase]
    code: str
    """Module with the functions `build_model`, `decayed`, `layers_above`, `checkpoint_activations`
    and `compile_blocks`; those of `vit.model` say what each does."""
    costs: Any
    """Formulas that take an architecture, as `vit.costs`; None: `code` counts a built model."""

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


MODELS = {
    "vit": ModelFamily(Settings=ViTSettings, code="vitscale.models.vit.model", costs=vit_costs),
    "timm": ModelFamily(Settings=TimmSettings, code="vitscale.models.timm_model", costs=None),
}


def costs_of(arch: Architecture) -> Any:
    """What has `num_parameters` and `train_flops_per_image` of this architecture."""
    family = MODELS[arch.name]
    return family.costs or family.load()


if TYPE_CHECKING:
    ModelSettings = ModelSettingsBase
else:
    ModelSettings = choice_of(MODELS, default="vit")
