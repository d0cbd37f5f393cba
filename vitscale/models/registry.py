"""The model families. Needs no torch.

A new family is one entry of `MODELS`. The code that builds it needs torch and is imported only
when a model is built; its settings and formulas need none, since a login node may have none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from vitscale.config.section import choice_of
from vitscale.models import costs
from vitscale.models.settings import Architecture, TimmSettings, ViTSettings


class ModelFamily(NamedTuple):
    """A family's settings, where its code is, and what its models cost."""

    Settings: type[Architecture]
    code: str
    """Module with the functions `build_model`, `decayed`, `layers_above`, `checkpoint_activations`
    and `compile_blocks`; those of `vit` say what each does."""
    costs: Any
    """Formulas that take resolved settings, as `costs`; None: `code` counts a built model."""

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


MODELS = {
    "vit": ModelFamily(ViTSettings, "vitscale.models.vit", costs),
    "timm": ModelFamily(TimmSettings, "vitscale.models.timm_model", None),
}


def costs_of(arch: Architecture) -> Any:
    """Return the module with `num_parameters` and `train_flops_per_image` of this model."""
    family = MODELS[arch.name]
    return family.costs or family.load()


if TYPE_CHECKING:
    # mypy cannot follow a type that is built from a dict.
    ModelSettings = Architecture
else:
    ModelSettings = choice_of(MODELS, default="vit")
