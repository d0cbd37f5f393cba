"""A Vision Transformer in numbers. Needs no torch.

Leaves out: the settings it is resolved from (`settings`).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.models.interface.architecture import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTArchitecture(Architecture):
    """A ViT in numbers. Sizes in pixels, widths in channels."""

    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_width: int
    representation_layer: bool = False
    pool: str = "cls"
    num_registers: int = 0
    positions: str = "learned"
    class_position: bool = True
    layer_scale: bool = False
    head_width: int | None = None
    """Channels of an attention head; None: width / num_heads."""
    pooled_class_token: bool = False
    """Whether there is a class token although the patches are pooled."""
    pool_norm: bool = False
    """Whether the last norm follows the mean of the patches instead of preceding it."""
    distillation_token: bool = False
    mlp: str = "gelu"
    name: str = "vit"

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        side = self.image_size // self.patch_size
        return (side, side)

    @property
    def patch_values(self) -> int:
        """Values of a patch, from which its token is made."""
        return 3 * self.patch_size**2

    @property
    def attention_width(self) -> int:
        """Channels of all heads together, in each of Q, K and V."""
        return self.num_heads * (self.head_width or self.width // self.num_heads)

    @property
    def mlp_ratio(self) -> float:
        """`mlp_width` / `width`, with which timm's rounding down gives `mlp_width` again."""
        ratio = self.mlp_width / self.width
        return ratio if int(self.width * ratio) == self.mlp_width else ratio + 0.25 / self.width

    @property
    def has_class_token(self) -> bool:
        return self.pool in ("cls", "cls_mean") or self.pooled_class_token

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Class token, distillation token and registers, in this order before the patches."""
        return int(self.has_class_token) + int(self.distillation_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        return self.num_patches + self.num_prefix_tokens

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position embedding; 0 when positions are fixed."""
        if self.positions != "learned":
            return 0
        own = int(self.has_class_token and self.class_position) + int(self.distillation_token)
        return self.num_patches + own

    @property
    def num_classifiers(self) -> int:
        """Classifiers: one, and one of the distillation token."""
        return 1 + int(self.distillation_token)

    @property
    def feature_width(self) -> int:
        return 2 * self.width if self.pool == "cls_mean" else self.width

    @property
    def summary(self) -> str:
        return f"{self.num_tokens} tokens"
