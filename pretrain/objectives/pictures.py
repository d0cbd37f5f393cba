"""Draw what an objective sees and what it predicts, as a PNG in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitscale.data.samples import EvaluationSamples
from vitscale.images.sheet import save_figure, sheet
from vitscale.images.size import rows_and_columns
from vitscale.models.objectives.reconstructions import reconstruction_rows
from vitscale.training.objective import Objective

if TYPE_CHECKING:
    from vitscale.training.loop import TrainingSession

NUM_IMAGES = 8


def draw_predictions(objective: Objective, session: TrainingSession) -> Path:
    """Draw the predictions of an objective in RECONSTRUCTIONS, in the run folder.

    Collective; rank 0 writes. Returns the file's path.
    """
    path = session.folder / "pictures/reconstructions.png"  # as finetune/visualize.py names it
    data, arch = session.run.data, session.arch
    model: Any = session.engine
    images_B3SS = sheet_images(session)
    model.eval()
    rows = reconstruction_rows(
        model,
        images_B3SS,
        settings=objective.settings,
        arch=arch,  # type: ignore[arg-type]  # these objectives take a ViT only
        seed=objective.seed,
        mean=data.mean,
        std=data.std,
    )
    model.train()
    if session.world.is_first:
        save_figure(sheet(rows), path)
    return path


def sheet_images(session: TrainingSession) -> torch.Tensor:
    """Images evenly spaced over the validation split, or the training split without one.

    uint8 [B, 3, S, S] on the device, at most NUM_IMAGES; not augmented.
    """
    index = session.data.parts[0] if session.val_index is None else session.val_index
    size, count = session.arch.image_size, min(NUM_IMAGES, index.num_samples)
    samples = EvaluationSamples(index, settings=session.run.data, image_size=size)
    images_B3SS = torch.empty(count, 3, *rows_and_columns(size), dtype=torch.uint8)
    for number, row in enumerate(images_B3SS):
        samples.fill(number * index.num_samples // count, row)
    return images_B3SS.to(session.world.device)
