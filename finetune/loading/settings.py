"""Which model a script reads, and on which device. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run, Section
from vitscale.images.size import ImageSizeSetting
from vitscale.models.registry import ModelSettings

WEIGHT_FILES = (".npz", ".safetensors")


class DeviceSettings(Section):
    """Where and how the model computes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPU where torch finds one, else CPU."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on GPU, fp32 on CPU. Weights stay in fp32."""
    batch: int = Field(default=64, gt=0)
    """Images that one process takes through one forward pass."""
    num_threads: int | None = Field(default=None, gt=0)
    """CPU threads of each process; null: its share of the cores."""
    timeout_min: float = Field(default=10.0, gt=0)
    """A collective that takes longer ends the command."""


class ModelRun(Run):
    """A command that applies a trained model."""

    init: str
    """The model: a run folder, a checkpoint folder, Google's .npz, or a .safetensors file with
    timm's names."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """The weights themselves (model) or their average (ema). auto: the average where the
    checkpoint has one."""
    init_grid: tuple[int, int] | None = Field(default=None, strict=False)
    """[rows, columns] of the position embedding in a file; null: a square grid."""
    model: ModelSettings | None = None
    """Family and size of the model in a weight file; a run folder has its own."""
    image_size: ImageSizeSetting | None = None
    """Apply the model at another image size, a number or [rows, columns], its position embeddings
    resized; null: its own."""
    patch_size: int | None = Field(default=None, gt=0)
    """Apply the model with another patch size, its patch embedding resized; null: its own. Beyer
    et al. 2023 (FlexiViT)."""
    position_embedding: Literal["google", "timm", "deit", "dinov2"] = "google"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md."""
    compute: DeviceSettings = DeviceSettings()
    """Device, precision and batch."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.model is not None:
            yield from self.model.problems()
