"""Draw rows of images as a PNG in the run folder: what an objective sees and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitscale.data.samples import EvaluationSamples

if TYPE_CHECKING:
    from vitscale.training.loop import TrainingSession

NUM_IMAGES = 8


def sheet_images(session: TrainingSession) -> torch.Tensor:
    """Images evenly spaced over the validation split, or the training split without one.

    uint8 [B, 3, S, S] on the device, at most NUM_IMAGES; not augmented.
    """
    index = session.data.parts[0] if session.val_index is None else session.val_index
    size, count = session.arch.image_size, min(NUM_IMAGES, index.num_samples)
    samples = EvaluationSamples(index, settings=session.run.data, image_size=size)
    images_B3SS = torch.empty(count, 3, size, size, dtype=torch.uint8)
    for number, row in enumerate(images_B3SS):
        samples.fill(number * index.num_samples // count, row)
    return images_B3SS.to(session.world.device)


def draw_sheet(rows: Mapping[str, torch.Tensor], *, path: Path) -> None:
    """rows: title -> uint8 images [B, 3, S, S], the same B in all."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
