"""Draw sheets of images, and save figures as PNG files that are whole or absent."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.distributed.atomic_files import atomic_file

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

DPI = 110
Cell = tuple[str, bool, "torch.Tensor | None"]
"""A caption, whether it is red, and a uint8 image [3, S, S]; None: the caption alone."""


def sheet(title: str, rows: Sequence[Sequence[Cell]], *, height: float) -> Figure:
    """Draw rows of images with captions. height: of a row, in inches."""
    from matplotlib.figure import Figure

    # The longest row decides; others end with a gap.
    columns = max(map(len, rows), default=1)
    size = (columns * 1.3, len(rows) * height + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    # Names of classes come from folder names: never let matplotlib read them as mathematics.
    figure.suptitle(title, fontsize=10, parse_math=False)
    for row, cells in enumerate(rows):
        for column, (text, is_red, image) in enumerate(cells):
            axes = figure.add_subplot(len(rows), columns, row * columns + column + 1)
            axes.set_axis_off()
            if image is None:
                axes.text(
                    1, 0.5, text, ha="right", va="center", fontsize=9, parse_math=False
                )
                continue
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            color = "#c0392b" if is_red else "black"
            axes.set_title(text, fontsize=8, color=color, parse_math=False)
    return figure


def caption(name: str, *, width: int, num_lines: int = 1) -> str:
    """The name in lines of at most `width` characters, broken between words where that fits.

    A longer name is shortened in the middle: names of related classes differ at either end.
    """
    name = name.replace("_", " ")
    lines = textwrap.wrap(name, width) or [name]
    # The widths of words decide where lines break, so the longest text that fits is tried out.
    for length in range(len(name) - 1, 1, -1):
        if len(lines) <= num_lines:
            break
        at_end = length // 2
        text = f"{name[: length - at_end]}…{name[-at_end:]}"
        lines = textwrap.wrap(text, width)
    return "\n".join(lines)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG; makes the folder of `path`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A viewer that is open reads the old picture or the new one, never half of it.
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DPI)
