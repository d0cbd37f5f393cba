"""Which model a script reads, and on which device. Needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from vitscale.config.section import Run, Section
from vitscale.models.registry import ModelSettings


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


class PreprocessingSettings(Section):
    """How images become the model's input; null: as the model was trained or published."""

    mean: tuple[float, float, float] | None = Field(default=None, strict=False)
    """Subtracted from red, green and blue, each in [0, 1]."""
    std: tuple[float, float, float] | None = Field(default=None, strict=False)
    """Red, green and blue are divided by it."""
    eval_resize: Literal["squash", "center_crop"] | None = None
    """As `data.eval_resize` of a training."""
    eval_crop_fraction: float | None = Field(default=None, gt=0, le=1)
    """center_crop only: image size / resized short side."""
    eval_interpolation: Literal["bilinear", "bicubic", "area"] | None = None
    """Filter of the resize."""
    eval_antialias: bool | None = None
    """Of the resize."""

    def chosen(self) -> dict[str, Any]:
        """The keys that are not null."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class ModelRun(Run):
    """A command that applies a trained model."""

    init: str
    """The model: a run folder, a checkpoint folder, a file of weights (.npz, .safetensors, .pth),
    or a folder of Hugging Face or timm; see docs/weights.md."""
    init_weights: Literal["auto", "model", "ema"] = "auto"
    """The weights themselves (model) or their average (ema). auto: the average, unless
    there is none or more than 1 % of it is the random start."""
    init_grid: tuple[int, int] | None = Field(default=None, strict=False)
    """[rows, columns] of the position embedding in a file; null: a square grid."""
    model: ModelSettings | None = None
    """Keys of the model that win over what is inferred from external weights, one by one, such as
    num_heads; a run folder has its own."""
    preprocessing: PreprocessingSettings = PreprocessingSettings()
    """Keys that win over the preprocessing that comes with the model, one by one."""
    image_size: PositiveInt | None = None
    """Apply the model at another image size, in pixels a side, its position embeddings resized;
    null: its own."""
    position_embedding: Literal["google", "timm", "deit", "dinov2"] = "google"
    """How learned position embeddings are resampled to the new grid; see docs/recipes.md."""
    compute: DeviceSettings = DeviceSettings()
    """Device, precision and batch."""

    def source(self) -> dict[str, Any]:
        """Arguments of `open_model`."""
        return {
            "init": self.init,
            "weights": self.init_weights,
            "grid": self.init_grid,
            "model": self.model,
            "preprocessing": self.preprocessing.chosen(),
            "image_size": self.image_size,
            "position_embedding": self.position_embedding,
        }
