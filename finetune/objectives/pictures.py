"""Draw test images with predicted and true classes, as a PNG in the run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from vitscale.data.index import SplitIndex
from vitscale.data.samples import EvaluationSamples
from vitscale.data.settings import DataSettings
from vitscale.engine.engine import Engine
from vitscale.images.sheet import caption, common_start, save_figure

SHEET_ROWS, SHEET_COLUMNS = 4, 8
NAME_WIDTH, NAME_LINES = 18, 2


@torch.no_grad()
def predictions_sheet(
    engine: Engine,
    index: SplitIndex,
    *,
    settings: DataSettings,
    image_size: int,
    folder: Path,
) -> Path:
    """Predict samples evenly spaced over the split and draw them. Collective; rank 0 writes.

    Returns the file's path. Wrong predictions are red, with the true class.
    """
    count = min(SHEET_ROWS * SHEET_COLUMNS, index.num_samples)
    chosen = torch.linspace(0, index.num_samples - 1, count).long().tolist()
    samples = EvaluationSamples(index, settings=settings, image_size=image_size)
    images = torch.empty(count, 3, image_size, image_size, dtype=torch.uint8)
    for row, sample in zip(images, chosen, strict=True):
        samples.fill(sample, row)
    engine.eval()
    predicted = engine.logits(images.to(engine.world.device)).argmax(dim=1).tolist()
    engine.train()
    path = folder / "pictures" / "test_predictions.png"
    if engine.world.is_first:
        labels = [int(index.label[sample]) for sample in chosen]
        _draw(images, predicted, labels, classes=index.classes, path=path)
    return path


def _draw(
    images_B3SS: torch.Tensor,
    predicted: list[int],
    labels: list[int],
    *,
    classes: tuple[str, ...],
    path: Path,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SHEET_COLUMNS * 1.3, SHEET_ROWS * 2.0 + 0.5), layout="constrained")
    start = common_start(classes[each] for each in (*predicted, *labels))
    right = sum(a == b for a, b in zip(predicted, labels, strict=True))
    figure.suptitle(
        f"Test images with the predicted class: {right} of {len(labels)} right, in black"
        + (f'; "{start}" is left out' if start else ""),
        fontsize=10,
        parse_math=False,
    )
    for number, image in enumerate(images_B3SS):
        axes = figure.add_subplot(SHEET_ROWS, SHEET_COLUMNS, number + 1)
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.set_axis_off()
        guess, truth = (
            caption(classes[each].removeprefix(start), width=NAME_WIDTH, num_lines=NAME_LINES)
            for each in (predicted[number], labels[number])
        )
        right = predicted[number] == labels[number]
        title = guess if right else f"{guess}\nis: {truth}"
        # Class names come from folder names: never let matplotlib read them as mathematics.
        axes.set_title(title, fontsize=8, color="black" if right else "#c0392b", parse_math=False)
    save_figure(figure, path)
