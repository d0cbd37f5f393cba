"""Draw sheets of images, and save figures as PNG files that are whole or absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitscale.distributed.atomic_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110


def sheet(rows: Mapping[str, torch.Tensor]) -> Figure:
    """rows: title -> uint8 images [B, 3, S, S], the same B in all; one column for each image."""
    from matplotlib.figure import Figure

    num_columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(num_columns * 1.3 + 1.2, len(rows) * 1.35), layout="constrained")
    for row, (title, images_B3SS) in enumerate(rows.items()):
        for column, image in enumerate(images_B3SS.cpu()):
            axes = figure.add_subplot(len(rows), num_columns, row * num_columns + column + 1)
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(title, fontsize=9)
    return figure


def caption(name: str, *, width: int) -> str:
    """The name, or its end if it is longer than `width` characters: `…_with_acute`.

    The long names of related classes begin alike and differ at their ends.
    """
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def save_figure(figure: Figure, path: Path, *, dpi: int = DPI) -> None:
    """Write a PNG; makes the folder of `path`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=dpi)
