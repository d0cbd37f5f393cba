"""Settings of the `model` group and the architecture they stand for.

Owns: the size table of the papers and its resolution into numbers. Needs no torch.
Leaves out: building (`vit`), costs (`costs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from vitscale.config.section import Section

# name: (width, depth, heads, MLP width). Ti, S: Touvron et al. 2021 (DeiT), table 1; B, L, H:
# Dosovitskiy et al. 2021, table 1; g: Zhai et al. 2022, table 2.
SIZES = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
}


class ModelSettings(Section):
    preset: str | None = None
    """SIZE/PATCH as in the papers, for example L/16. The four numbers below override it."""
    image_size: int = Field(default=224, gt=0)
    """Pixels a side; images are square."""
    patch_size: int | None = Field(default=None, gt=0)
    width: int | None = Field(default=None, gt=0)
    depth: int | None = Field(default=None, gt=0)
    num_heads: int | None = Field(default=None, gt=0)
    mlp_width: int | None = Field(default=None, gt=0)
    num_classes: int | None = Field(default=None, gt=0)
    """null: as many as the shards' label map holds."""
    pool: Literal["cls", "gap"] = "cls"
    """What the head sees: the class token, or the mean of the patch tokens."""
    representation_layer: bool = False
    """A tanh layer before the head; dropped on transfer. Dosovitskiy et al. 2021, sec. 3.1."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """Flax, hence the papers' weights, use the tanh approximation; timm and PyTorch use erf."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """After position embeddings and every dense layer except QKV; never on attention weights."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    head_bias: float = 0.0
    """Initial bias of the head; -10 with the summed sigmoid over 21k classes (AugReg)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A ViT in numbers. Sizes in pixels, widths in channels."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_width: int
    num_classes: int
    representation_layer: bool = False
    pool: str = "cls"

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        side = self.image_size // self.patch_size
        return (side, side)

    @property
    def num_prefix_tokens(self) -> int:
        return 1 if self.pool == "cls" else 0

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.num_prefix_tokens


def _preset_numbers(preset: str | None) -> dict[str, int]:
    """The five numbers a preset stands for; empty for null and for unreadable names."""
    if preset is None:
        return {}
    size, _, patch = preset.partition("/")
    if size not in SIZES or not patch.isdigit() or int(patch) == 0:
        return {}
    names = ("width", "depth", "num_heads", "mlp_width")
    return dict(zip(names, SIZES[size], strict=True)) | {"patch_size": int(patch)}


def _numbers(model: ModelSettings) -> dict[str, int]:
    chosen = {
        name: getattr(model, name)
        for name in ("width", "depth", "num_heads", "mlp_width", "patch_size")
        if getattr(model, name) is not None
    }
    return _preset_numbers(model.preset) | chosen


def architecture(model: ModelSettings, *, num_classes: int) -> Architecture:
    """Resolve validated settings; `num_classes` counts only when the settings leave it open."""
    return Architecture(
        image_size=model.image_size,
        num_classes=model.num_classes or num_classes,
        representation_layer=model.representation_layer,
        pool=model.pool,
        **_numbers(model),
    )


def model_problems(model: ModelSettings) -> Iterator[tuple[str, str]]:
    """Conflicts between model settings, as (dotted key, what is wrong and what to do)."""
    if model.preset is not None and not _preset_numbers(model.preset):
        yield (
            "model.preset",
            f"{model.preset!r} is not SIZE/PATCH with SIZE one of {', '.join(SIZES)}, "
            "for example L/16",
        )
        return
    numbers = _numbers(model)
    missing = {"width", "depth", "num_heads", "mlp_width", "patch_size"} - set(numbers)
    if missing:
        yield ("model", f"without a preset these are needed too: {', '.join(sorted(missing))}")
        return
    width, heads, patch = numbers["width"], numbers["num_heads"], numbers["patch_size"]
    if width % heads:
        yield (
            "model.num_heads",
            f"{heads} heads do not divide width {width} (remainder {width % heads})",
        )
    if model.image_size % patch:
        below = model.image_size // patch * patch
        sizes = [size for size in (below, below + patch) if size]
        yield (
            "model.image_size",
            f"{model.image_size} px is not a multiple of the {patch} px patch "
            f"(remainder {model.image_size % patch}); nearest: {' or '.join(map(str, sizes))}",
        )
