"""The settings that every model family has. Needs no torch."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from vitscale.config.section import NamedSection
from vitscale.models.interface.architecture import Architecture


class ModelSettingsBase(NamedSection):
    """A family and its size. Concrete types narrow `name` and define `architecture`."""

    image_size: PositiveInt = 224
    """Pixels a side."""
    num_classes: int | None = Field(default=None, gt=0)
    """null: as many as the shards' label map holds."""
    head_bias: float = 0.0
    """Initial bias of the head; -10 with the summed sigmoid over 21k classes (AugReg)."""
    head_std: float = Field(default=0.0, ge=0)
    """Spread of the head's initial weights; 0 in the ViT papers, 2e-5 in MAE's fine-tuning."""

    @property
    def title(self) -> str:
        """Family and size in words."""
        raise NotImplementedError

    def architecture(self, *, num_classes: int) -> Architecture:
        """Resolve validated settings; `num_classes` counts only where they leave it open."""
        raise NotImplementedError
