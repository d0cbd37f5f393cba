"""The settings of objectives whose predictions can be drawn: `RECONSTRUCTIONS` reads them too.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import NamedSection
from vitscale.models.objectives.mae_costs import DecoderSize
from vitscale.models.vit.architecture import ViTArchitecture

NUM_COLORS = 512  # 3 bits a channel


class MaeSettings(NamedSection):
    name: Literal["mae"] = "mae"
    """The pixels of removed patches are predicted from the others. He et al. 2022."""
    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    """Share of the patches that are removed; the number kept is rounded down."""
    normalized_pixels: bool = True
    """Predict each patch minus its mean, over its deviation; section 4.1: 85.4 against 84.9 %."""
    decoder_width: int = Field(default=512, gt=0)
    """Channels of the decoder; 4 divides it."""
    decoder_depth: int = Field(default=8, gt=0)
    """Blocks of the decoder; 1 is enough for fine-tuning, not for a linear probe (table 1)."""
    decoder_heads: int = Field(default=16, gt=0)
    """Attention heads of the decoder; they divide its width."""

    @property
    def decoder(self) -> DecoderSize:
        return DecoderSize(
            width=self.decoder_width, depth=self.decoder_depth, num_heads=self.decoder_heads
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        width, heads = self.decoder_width, self.decoder_heads
        if width % heads:
            what = f"{heads} heads do not divide width {width} (remainder {width % heads})"
            yield ("objective.decoder_heads", f"{what}; change one of them")
        if width % 4:
            what = f"{width}: sin-cos positions need a width that 4 divides"
            yield ("objective.decoder_width", f"{what}; change it")


class MaskedPatchPredictionSettings(NamedSection):
    name: Literal["masked_patch_prediction"] = "masked_patch_prediction"
    """The mean colours of corrupted patches are predicted from their output tokens, without labels.
    Dosovitskiy et al. 2021, appendix B.1.2."""
    corrupted_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the patches of each image that are corrupted and predicted, rounded to a number."""
    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Probability that a corrupted patch is replaced by the mask embedding."""
    swap_share: float = Field(default=0.1, ge=0, le=1)
    """Probability that it is replaced by another patch of the image; the rest is kept."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.mask_share + self.swap_share > 1 + 1e-9:
            what = f"{self.mask_share} and swap_share {self.swap_share} exceed 1 together"
            yield ("objective.mask_share", f"{what}; lower one of them")

    def num_corrupted(self, arch: ViTArchitecture) -> int:
        """Corrupted patches of each image: a fixed number, so that shapes never change."""
        return round(self.corrupted_share * arch.num_patches)
