"""A BiT ResNet in numbers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.models.interface.architecture import Architecture
from vitscale.models.resnet.units import feature_stride, feature_width


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetArchitecture(Architecture):
    """A BiT ResNet in numbers."""

    stage_depths: tuple[int, ...]
    """Units of each stage."""
    root_width: int
    """Channels after the root."""

    @property
    def num_units(self) -> int:
        return sum(self.stage_depths)

    @property
    def feature_shape(self) -> tuple[int, int]:
        """(rows, columns) of the last feature map."""
        stride = feature_stride(self.stage_depths)
        rows, columns = self.image_shape
        return -(-rows // stride), -(-columns // stride)

    @property
    def feature_width(self) -> int:
        return feature_width(self.stage_depths, root_width=self.root_width)

    @property
    def summary(self) -> str:
        rows, columns = self.feature_shape
        return f"{rows} x {columns} features of {self.feature_width:,} channels"
