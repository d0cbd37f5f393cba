"""Settings of a BiT ResNet and the architecture they resolve to.

Leaves out: building (`model`), costs (`costs`). Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.models.interface.settings import ModelSettingsBase
from vitscale.models.resnet.architecture import ResNetArchitecture
from vitscale.models.resnet.units import DEPTHS, ROOT_WIDTH, size_problems

PRESET = re.compile(r"(R\d+)x([1-9])")


class ResNetSettings(ModelSettingsBase):
    """A ResNet of BiT (Kolesnikov et al. 2020): the baseline of the ViT paper."""

    name: Literal["bit_resnet"] = "bit_resnet"
    """Pre-activation units, group normalisation, standardised weights."""
    preset: str | None = None
    """DEPTHxWIDTH as in the papers, for example R50x1. The two keys below override it."""
    stage_depths: tuple[int, ...] | None = Field(default=None, strict=False)
    """Units of each stage, at most 4 of them; all stages but the first halve the feature map."""
    root_width: int | None = Field(default=None, gt=0)
    """Channels after the root; null: 64 times the preset's width. Stage i puts out 4 * 2^(i-1)
    times as many."""

    def _sizes(self) -> tuple[tuple[int, ...], int | None] | None:
        """(stage depths, root width); None for an unreadable preset."""
        depths, width = self.stage_depths, self.root_width
        if self.preset is not None:
            found = PRESET.fullmatch(self.preset)
            if found is None or found[1] not in DEPTHS:
                return None
            depths = DEPTHS[found[1]] if depths is None else depths
            width = ROOT_WIDTH * int(found[2]) if width is None else width
        return depths or (), width

    def architecture(self, *, num_classes: int) -> ResNetArchitecture:
        sizes = self._sizes()
        assert sizes is not None and sizes[1] is not None
        return ResNetArchitecture(
            name=self.name,
            image_size=self.image_size,
            num_classes=self.num_classes or num_classes,
            stage_depths=sizes[0],
            root_width=sizes[1],
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        sizes = self._sizes()
        if sizes is None:
            yield (
                "model.preset",
                f"{self.preset!r} is not DEPTHxWIDTH with DEPTH one of {', '.join(DEPTHS)} and "
                "WIDTH from 1 to 9, for example R50x1",
            )
            return
        depths, width = sizes
        if not depths or width is None:
            yield ("model", "without a preset, stage_depths and root_width are needed too")
            return
        yield from size_problems(depths, root_width=width)
