"""The objectives of fine-tuning, with a picture of predictions at the end.

Needs no torch when imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitscale.config.section import NamedSection, choice_of
from vitscale.objectives.objective import Distillation, Objective, Supervised

if TYPE_CHECKING:
    from vitscale.training.session import TrainingSession

SHEET_ROWS = 4
SHEET_COLUMNS = 8


class PredictionsDrawn(Objective):
    def draw(self, session: TrainingSession) -> None:
        """Predict samples evenly spaced over the split and draw them, wrong ones in red.

        Collective; rank 0 writes.
        """
        import torch

        from vitscale.evaluation.samples import EvaluationSamples
        from vitscale.evaluation.sheet import caption, save_figure, sheet

        index = session.val_index
        if index is None:
            return

        # Evenly spaced, since neighbours in a split may be of one class.
        count = min(SHEET_ROWS * SHEET_COLUMNS, index.num_samples)
        numbers = torch.linspace(0, index.num_samples - 1, count).long().tolist()
        size = session.arch.image_size
        samples = EvaluationSamples(index, settings=session.run.data, image_size=size)
        images = torch.empty(count, 3, size, size, dtype=torch.uint8)
        for image, number in zip(images, numbers, strict=True):
            samples.fill(number, image)

        # On all ranks, since under ZeRO 3 a forward pass gathers weights.
        engine = session.engine
        engine.eval()
        with torch.no_grad():
            logits = engine.logits(images.to(engine.world.device))
        engine.train()
        if not engine.world.is_first:
            return

        predicted = logits.argmax(dim=1).tolist()
        labels = [int(index.label[number]) for number in numbers]
        # Names of ImageNet's classes are lists of synonyms, too long for a small picture.
        names = {
            label: caption(index.classes[label], width=18, num_lines=2)
            for label in {*predicted, *labels}
        }

        # Where the prediction is right, its name is the true one.
        cells = []
        num_right = 0
        for guess, label, image in zip(predicted, labels, images, strict=True):
            text = names[guess]
            if guess == label:
                num_right += 1
            else:
                text += f"\nis: {names[label]}"
            cells.append((text, guess != label, image))

        rows = [
            cells[start : start + SHEET_COLUMNS]
            for start in range(0, count, SHEET_COLUMNS)
        ]
        title = f"Test images with the predicted class: {num_right} of {count} right, in black"
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

# mypy cannot follow a type that is built from a dict.
if TYPE_CHECKING:
    ObjectiveSettings = NamedSection
else:
    ObjectiveSettings = choice_of(OBJECTIVES, default="supervised")
