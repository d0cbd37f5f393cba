"""Draw what an objective sees and what it predicts, as a PNG in the run folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vitscale.evaluation.samples import EvaluationSamples
from vitscale.evaluation.sheet import save_figure, sheet

if TYPE_CHECKING:
    from vitscale.training.session import TrainingSession

NUM_IMAGES = 8


@torch.no_grad()
def draw_predictions(
    session: TrainingSession, rows: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    """Draw a sheet in the run folder. Collective; rank 0 writes.

    The images are evenly spaced over the validation split, or the training split without one.
    rows: uint8 images [B, 3, S, S] on the device -> title -> such images, of a model in eval mode.
    """
    # Images that are not trained on show what the model has learned.
    index = session.val_index
    if index is None:
        index = session.data.parts[0]

    # Views without random crops: two runs then show the same pixels.
    size = session.arch.image_size
    samples = EvaluationSamples(index, settings=session.run.data, image_size=size)
    num_images = min(NUM_IMAGES, index.num_samples)
    images_B3SS = torch.empty(num_images, 3, size, size, dtype=torch.uint8)
    for number, image in enumerate(images_B3SS):
        samples.fill(number * index.num_samples // num_images, image)

    # On all ranks, since under ZeRO 3 a forward pass gathers weights.
    session.engine.eval()
    images_by_title = rows(images_B3SS.to(session.world.device))
    session.engine.train()
    if not session.world.is_first:
        return

    cells = [
        [(title, False, image) for image in images.cpu()]
        for title, images in images_by_title.items()
    ]
    figure = sheet("What the objective sees and predicts", cells, width=1.35)
    save_figure(figure, session.folder / "pictures/reconstructions.png")
