"""What every architecture has, whatever its family. Needs no torch.

Leaves out: the numbers of each family (`architecture` or `settings` beside its code).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model in numbers. Sizes in pixels, widths in channels."""

    image_size: int
    """Pixels a side."""
    num_classes: int
    name: str
    """Key of `MODELS`."""

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the position embedding; (1, 1) where there is none."""
        return (1, 1)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before those of the grid."""
        return 0

    @property
    def feature_width(self) -> int:
        """Channels of the features that the head sees."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The size of what the model computes on, in words, such as `197 tokens`."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        """All fields as JSON values, for checkpoints."""
        return asdict(self)
