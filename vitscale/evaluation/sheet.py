"""Draw sheets of images, and save figures as PNG files that are whole or absent."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from vitscale.distributed.atomic_files import atomic_file

DPI = 110
# Of the small images of a sheet.
SHOWN_PX = 180
# Inches of a line of a caption, and of the title.
LINE = 0.16
TITLE = 0.4
Cell = tuple[str, bool, torch.Tensor]
"""A caption, whether it is red, and an image [3, S, S], uint8 or float 0..1."""


def sheet(title: str, rows: Sequence[Sequence[Cell]], *, width: float) -> Figure:
    """Draw rows of images with captions. width: of an image, in inches."""
    # A row is as high as its images and its longest caption, so that there are no gaps.
    heights = [
        width + LINE * (1 + max(text.count("\n") for text, _, _ in cells))
        for cells in rows
    ]
    # The longest row decides; others end with a gap.
    columns = max(map(len, rows), default=1)
    size = (columns * width, sum(heights) + TITLE)
    figure = titled_figure(title, size=size)
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for row, cells in enumerate(rows):
        for column, (text, is_red, image) in enumerate(cells):
            axes = figure.add_subplot(grid[row, column])
            axes.set_axis_off()
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            color = "#c0392b" if is_red else "black"
            axes.set_title(text, fontsize=8, color=color, parse_math=False, pad=3)
    return figure


def titled_figure(title: str, *, size: tuple[float, float]) -> Figure:
    """An empty figure. size: width and height in inches."""
    figure = Figure(figsize=size, layout="constrained")
    # Names of classes come from folder names: never let matplotlib read them as mathematics.
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def shown_size(image_size: int, *, at_least: int) -> int:
    """A multiple of the model's image size, so that people see the same crop with its details."""
    return image_size * math.ceil(at_least / image_size)


def caption(name: str, *, width: int, num_lines: int = 1) -> str:
    """The name in lines of at most `width` characters, broken between words where that fits.

    What does not fit is left out at the end, as in lists of synonyms.
    """
    lines = textwrap.wrap(
        name.replace("_", " "), width, max_lines=num_lines, placeholder=" …"
    )
    return "\n".join(lines)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG; makes the folder of `path`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A viewer that is open reads the old picture or the new one, never half of it.
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DPI)
