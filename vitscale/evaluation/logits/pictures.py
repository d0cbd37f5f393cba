"""Draw images of the validation split with titles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.evaluation.interface.evaluation import Subject

MAX_NAME = 14


def draw_samples(
    subject: Subject, rows: Sequence[tuple[str, list[int], list[str]]], *, path: Path
) -> None:
    """Write a PNG. rows: name, numbers of the samples, and the title of each; may be empty.

    Raises OSError and UserError.
    """
    import torch
    from matplotlib.figure import Figure

    from vitscale.data.samples import EvaluationSamples
    from vitscale.images.sheet import save_figure
    from vitscale.images.size import rows_and_columns

    samples = EvaluationSamples(subject.val, settings=subject.data, image_size=subject.image_size)
    pixels = torch.empty(3, *rows_and_columns(subject.image_size), dtype=torch.uint8)
    columns = max((len(numbers) for _, numbers, _ in rows), default=0) + 1
    figure = Figure(figsize=(columns * 1.2, len(rows) * 1.4 + 0.2), layout="constrained")
    for row, (name, numbers, titles) in enumerate(rows):
        axes = figure.add_subplot(len(rows), columns, row * columns + 1)
        axes.set_axis_off()
        axes.text(1, 0.5, name, ha="right", va="center", fontsize=9, parse_math=False)
        for column, (number, title) in enumerate(zip(numbers, titles, strict=True), start=2):
            samples.fill(number, pixels)
            axes = figure.add_subplot(len(rows), columns, row * columns + column)
            axes.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_axis_off()
            # Class names come from folder names: never let matplotlib read them as mathematics.
            axes.set_title(title[:MAX_NAME], fontsize=8, color="#c0392b", parse_math=False)
    save_figure(figure, path)
