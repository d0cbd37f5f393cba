"""The objectives of fine-tuning, with a picture of predictions at the end.

Needs no torch when imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.config.section import NamedSection, choice_of
from vitscale.training.distillation import Distillation
from vitscale.training.objective import Objective
from vitscale.training.supervised import Supervised

if TYPE_CHECKING:
    import torch

    from vitscale.training.loop import TrainingSession

SHEET_ROWS, SHEET_COLUMNS = 4, 8
NAME_WIDTH, NAME_LINES = 18, 2


class PredictionsDrawn(Objective):
    def draw(self, session: TrainingSession) -> None:
        """Predict samples evenly spaced over the split and draw them. Collective; rank 0 writes."""
        import torch

        from vitscale.data.samples import EvaluationSamples

        index, engine, size = session.val_index, session.engine, session.arch.image_size
        if index is None:
            return
        count = min(SHEET_ROWS * SHEET_COLUMNS, index.num_samples)
        chosen = torch.linspace(0, index.num_samples - 1, count).long().tolist()
        samples = EvaluationSamples(index, settings=session.run.data, image_size=size)
        images = torch.empty(count, 3, size, size, dtype=torch.uint8)
        for row, sample in zip(images, chosen, strict=True):
            samples.fill(sample, row)
        engine.eval()
        with torch.no_grad():
            predicted = engine.logits(images.to(engine.world.device)).argmax(dim=1).tolist()
        engine.train()
        if engine.world.is_first:
            path = session.folder / "pictures" / "test_predictions.png"
            labels = [int(index.label[sample]) for sample in chosen]
            _draw(images, predicted, labels, classes=index.classes, path=path)


def _draw(
    images_B3SS: torch.Tensor,
    predicted: Sequence[int],
    labels: Sequence[int],
    *,
    classes: tuple[str, ...],
    path: Path,
) -> None:
    """Wrong predictions are red, with the true class."""
    from matplotlib.figure import Figure

    from vitscale.images.sheet import caption, common_start, save_figure

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


class Transfer(PredictionsDrawn, Supervised):
    """Labels alone."""


class DistilledTransfer(PredictionsDrawn, Distillation):
    """DeiT's fine-tuning at a higher resolution, with the teacher."""


OBJECTIVES: dict[str, type[Objective]] = {
    "supervised": Transfer,
    "distillation": DistilledTransfer,
}

if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES)
