"""The objectives of fine-tuning, with a picture of predictions at the end.

Needs no torch when imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitscale.config.section import NamedSection, choice_of
from vitscale.objectives.objective import Distillation, Objective, Supervised

if TYPE_CHECKING:
    from vitscale.training.session import TrainingSession

SHEET_ROWS, SHEET_COLUMNS = 4, 8


class PredictionsDrawn(Objective):
    def draw(self, session: TrainingSession) -> None:
        """Predict samples evenly spaced over the split and draw them, wrong ones in red.

        Collective; rank 0 writes.
        """
        import torch

        from vitscale.data.samples import EvaluationSamples
        from vitscale.evaluation.sheet import caption, save_figure, sheet

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
            predicted = (
                engine.logits(images.to(engine.world.device)).argmax(dim=1).tolist()
            )
        engine.train()
        if not engine.world.is_first:
            return
        labels = [int(index.label[sample]) for sample in chosen]
        names = {
            label: caption(index.classes[label], width=18, num_lines=2)
            for label in {*predicted, *labels}
        }
        cells = [
            (
                names[guess]
                if guess == label
                else f"{names[guess]}\nis: {names[label]}",
                label != guess,
                image,
            )
            for guess, label, image in zip(predicted, labels, images, strict=True)
        ]
        right = sum(not is_wrong for _, is_wrong, _ in cells)
        title = (
            f"Test images with the predicted class: {right} of {count} right, in black"
        )
        rows = [cells[at : at + SHEET_COLUMNS] for at in range(0, count, SHEET_COLUMNS)]
        path = session.folder / "pictures" / "test_predictions.png"
        save_figure(sheet(title, rows, height=2.0), path)


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
    ObjectiveSettings = choice_of(OBJECTIVES, default="supervised")
