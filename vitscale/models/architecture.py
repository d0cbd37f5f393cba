"""An architecture in numbers. Needs no torch.

Leaves out: the settings it is resolved from (`settings`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

# Left out of a description at their defaults: older checkpoints were written without them.
LATER_FIELDS = (
    "num_registers",
    "positions",
    "class_position",
    "layer_scale",
    "patch_dropout",
    "head_width",
    "name",
)


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
    num_registers: int = 0
    positions: str = "learned"
    class_position: bool = True
    layer_scale: bool = False
    patch_dropout: float = 0.0
    head_width: int | None = None
    """Channels of an attention head; None: width / num_heads."""
    name: str = "vit"
    """Key of `MODELS`."""

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of whole patches; pixels beyond the last one are not seen."""
        side = self.image_size // self.patch_size
        return (side, side)

    @property
    def attention_width(self) -> int:
        """Channels of all heads together, in each of Q, K and V."""
        return self.num_heads * (self.head_width or self.width // self.num_heads)

    @property
    def has_class_token(self) -> bool:
        return self.pool == "cls"

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Class token and registers, in this order before the patches."""
        return int(self.has_class_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        return self.num_patches + self.num_prefix_tokens

    @property
    def num_train_tokens(self) -> int:
        """What the blocks see in training; timm rounds the kept patches down, but to 1 at least."""
        kept = max(1, int(self.num_patches * (1.0 - self.patch_dropout)))
        return kept + self.num_prefix_tokens

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position embedding; 0 when positions are fixed."""
        if self.positions != "learned":
            return 0
        return self.num_patches + int(self.has_class_token and self.class_position)

    def description(self) -> dict[str, Any]:
        """All fields as plain values, for checkpoints.

        Fields of `LATER_FIELDS` are left out at their defaults, so that checkpoints written
        before these options existed still describe the same architecture.
        """
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in LATER_FIELDS or value != defaults[name]
        }
