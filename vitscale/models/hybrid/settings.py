"""Settings of a hybrid and the architecture they resolve to.

Leaves out: building (`model`), costs (`costs`). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.images.size import sides_of
from vitscale.models.hybrid.architecture import HybridArchitecture
from vitscale.models.resnet.units import DEPTHS, ROOT_WIDTH, feature_stride, size_problems
from vitscale.models.vit.settings import NUMBERS, TransformerSettings, size_numbers

# The paper moves the units of stage 4 into stage 3 where the sequence is four times as long:
# Dosovitskiy et al. 2021, sec. 4.1.
R50_WITHOUT_STAGE_4 = (3, 4, 9)
# name: (size of the transformer, units of each stage, patch on the feature map). Dosovitskiy et
# al. 2021, sec. 4.1 and table 6; R26 and R+Ti: Steiner et al. 2021 (AugReg). R+Ti/16 covers 32
# pixels a patch, in spite of its name: the root has a stride of 4.
PRESETS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R+Ti/16": ("Ti", (), 8),
    "R26+S/32": ("S", DEPTHS["R26"], 1),
    "R50+B/16": ("B", R50_WITHOUT_STAGE_4, 1),
    "R50+B/32": ("B", DEPTHS["R50"], 1),
    "R50+L/16": ("L", R50_WITHOUT_STAGE_4, 1),
    "R50+L/32": ("L", DEPTHS["R50"], 1),
}


class HybridSettings(TransformerSettings):
    """A Vision Transformer on the feature map of a ResNet."""

    name: Literal["hybrid"] = "hybrid"
    """A ResNet with group normalisation and standardised weights makes the patches. Dosovitskiy et
    al. 2021, sec. 3.1."""
    preset: str | None = None
    """RESNET+SIZE/PATCH as in the papers, for example R50+B/16. `stage_depths`, `root_width`,
    `patch_size`, `width`, `depth`, `num_heads` and `mlp_width` override it."""
    stage_depths: tuple[int, ...] | None = Field(default=None, strict=False)
    """Units of each stage of the ResNet, at most 4 of them; all but the first halve the feature
    map. []: the root alone."""
    root_width: int = Field(default=ROOT_WIDTH, gt=0)
    """Channels after the ResNet's root; stage i puts out 4 * 2^(i-1) times as many."""
    patch_size: int | None = Field(default=None, gt=0)
    """Positions a side of a patch on the feature map, not pixels."""

    def preset_numbers(self) -> dict[str, int]:
        if self.preset not in PRESETS:
            return {}
        size, _, patch = PRESETS[self.preset]
        return size_numbers(size, patch_size=patch)

    def _depths(self) -> tuple[int, ...] | None:
        if self.stage_depths is None and self.preset in PRESETS:
            return PRESETS[self.preset][1]
        return self.stage_depths

    def architecture(self, *, num_classes: int) -> HybridArchitecture:
        depths = self._depths()
        assert depths is not None
        return HybridArchitecture(
            **self.transformer_values(num_classes=num_classes),
            stage_depths=depths,
            root_width=self.root_width,
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.preset is not None and self.preset not in PRESETS:
            yield ("model.preset", f"{self.preset!r} is not one of {', '.join(PRESETS)}")
            return
        numbers, depths = self.numbers(), self._depths()
        missing = sorted(set(NUMBERS) - set(numbers))
        if depths is None:
            missing.append("stage_depths")
        if missing or depths is None:
            yield ("model", f"without a preset these are needed too: {', '.join(missing)}")
            return
        yield from size_problems(depths, root_width=self.root_width)
        yield from self.transformer_problems()
        stride = feature_stride(depths) * numbers["patch_size"]
        for side in sides_of(self.image_size):
            if side % stride == 0:
                continue
            below = side // stride * stride
            sizes = [str(size) for size in (below, below + stride) if size]
            yield (
                "model.image_size",
                f"{side} px is not a multiple of the {stride} px that a patch of the "
                f"feature map covers; nearest: {' or '.join(sizes)}",
            )
