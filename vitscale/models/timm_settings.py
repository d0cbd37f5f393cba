"""Settings of a model of timm. Needs no torch, and so does not know which names timm has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vitscale.models.interface.architecture import Architecture
from vitscale.models.interface.settings import ModelSettingsBase

# Arguments of timm.create_model that have a setting, or that would load or download weights.
SETTINGS = {"num_classes": "model.num_classes", "img_size": "model.image_size"}
LOADING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmArchitecture(Architecture):
    """A model of timm by its name."""

    name: str = "timm"
    model: str
    arguments: dict[str, Any]

    @property
    def summary(self) -> str:
        return f"timm's {self.model}"


class TimmSettings(ModelSettingsBase):
    """A model of timm. Its costs are known when it is built."""

    name: Literal["timm"] = "timm"
    """Any model of timm without BatchNorm, whose statistics differ between ranks. timm draws its
    initial weights but those of the classifier, and timm's `group_matcher` says what a layer is."""
    model: str
    """timm's name, such as vit_base_r50_s16_224; timm.list_models() lists them."""
    arguments: dict[str, Any] = {}
    """Further arguments of timm.create_model, such as {drop_path_rate: 0.1}."""

    @property
    def title(self) -> str:
        return f"timm {self.model}"

    def architecture(self, *, num_classes: int) -> TimmArchitecture:
        return TimmArchitecture(
            image_size=self.image_size,
            num_classes=self.num_classes or num_classes,
            model=self.model,
            arguments=self.arguments,
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in self.arguments:
            if name in SETTINGS:
                yield ("model.arguments", f"{name} has a key of its own: set {SETTINGS[name]}")
            if name in LOADING:
                yield ("model.arguments", f"{name} loads weights; remove it, and set init")
