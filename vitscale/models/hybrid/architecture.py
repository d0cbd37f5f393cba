"""A hybrid of ResNet and Vision Transformer in numbers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitscale.models.resnet.units import feature_stride, feature_width
from vitscale.models.vit.architecture import ViTArchitecture


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridArchitecture(ViTArchitecture):
    """A hybrid in numbers. `patch_size` counts positions of the feature map."""

    later_fields: ClassVar[tuple[str, ...]] = tuple(
        name for name in ViTArchitecture.later_fields if name != "name"
    )

    name: str = "hybrid"
    stage_depths: tuple[int, ...]
    """Units of each stage of the stem; empty: the root alone."""
    root_width: int
    """Channels after the root."""

    @property
    def stride(self) -> int:
        """Pixels a side for each patch."""
        return feature_stride(self.stage_depths) * self.patch_size

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.image_shape
        return (rows // self.stride, columns // self.stride)

    @property
    def patch_values(self) -> int:
        channels = feature_width(self.stage_depths, root_width=self.root_width)
        return channels * self.patch_size**2
