"""The confusion matrix, and pictures of the images that the worst classes lose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from vitscale.evaluation.evaluation import (
    Outputs,
    PassEvaluation,
    SettingsBase,
    Subject,
    check_labels,
    columns_on,
)

if TYPE_CHECKING:
    import torch


class ConfusionSettings(SettingsBase):
    name: Literal["confusion"] = "confusion"
    """Metric: val/worst_classes_top1, the mean of the worst classes. Files: confusion.csv (cells of
    the matrix that are not 0, the most frequent confusions first), worst_classes.png."""
    num_classes: int = Field(default=10, gt=0)
    """Number of worst classes."""
    num_examples: int = Field(default=8, gt=0)
    """Pictures of each worst class, with different wrong predictions."""


class Confusion(PassEvaluation):
    Settings = ConfusionSettings

    def start(self, subject: Subject) -> None:
        self._subject = subject
        self._columns_C = columns_on(
            subject, check_labels(subject, name="confusion").columns
        )
        self._rows: list[torch.Tensor] = []

    def add(self, outputs: Outputs) -> None:
        import torch

        guesses_B = outputs.of(self._columns_C).values_BX.argmax(dim=1)
        samples_B = torch.from_numpy(outputs.samples_B).to(guesses_B.device)
        # Padding is dropped at the end: to select on a GPU would wait for it at every batch.
        is_real_B = outputs.weights_B.long()
        self._rows.append(
            torch.stack([outputs.labels_B, guesses_B, samples_B, is_real_B], dim=1)
        )

    def finish(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        # The cells of 21,000 classes would be a matrix of 477 million; those that occur are few.
        own_B4 = torch.cat(self._rows)
        rows_RB4 = [torch.empty_like(own_B4) for _ in range(dist.get_world_size())]
        dist.all_gather(rows_RB4, own_B4)
        rows_N4 = torch.cat(rows_RB4).cpu().numpy()
        self._rows = []
        predictions_N3 = rows_N4[rows_N4[:, 3] > 0, :3]  # label, guess, sample

        images = Counter(predictions_N3[:, 0].tolist())
        cells = Counter((label, guess) for label, guess, _ in predictions_N3.tolist())
        shares = {
            label: cells[label, label] / number for label, number in images.items()
        }
        # Equally bad classes are ordered by label: the choice must not depend on the ranks.
        by_share = sorted(shares, key=lambda label: (shares[label], label))
        worst = by_share[: self.settings.num_classes]
        self._write_cells(cells)

        chosen = []
        for label in worst:
            wrong = examples(predictions_N3, label, count=self.settings.num_examples)
            chosen.append((label, shares[label], wrong))
        self._subject.write("worst_classes.png", lambda path: self._draw(path, chosen))
        mean = np.mean([shares[label] for label in worst])
        return {"worst_classes_top1": float(mean)}

    def _write_cells(self, cells: Counter[tuple[int, int]]) -> None:
        """Confusions first, the most frequent ones at the top; then the right predictions."""
        classes = self._subject.val.classes
        lines: list[tuple[object, ...]] = [("class", "predicted", "images")]
        # Equally frequent cells are ordered by label and guess.
        for (label, guess), number in sorted(
            cells.items(), key=lambda cell: (len({*cell[0]}) == 1, -cell[1], cell[0])
        ):
            lines.append((classes[label], classes[guess], number))
        self._subject.write_table("confusion.csv", lines)

    def _draw(
        self, path: Path, chosen: list[tuple[int, float, list[tuple[int, int]]]]
    ) -> None:
        """One row for each class: label, accuracy, and images of it that were taken for others."""
        import torch

        from vitscale.evaluation.samples import EvaluationSamples
        from vitscale.evaluation.sheet import caption, save_figure, sheet

        subject = self._subject
        size = subject.image_size

        def name(label: int) -> str:
            return caption(subject.val.classes[label], width=18, num_lines=2)

        samples = EvaluationSamples(subject.val, settings=subject.data, image_size=size)
        rows = []
        for label, share, wrong in chosen:
            row: list[Any] = [(f"{name(label)}\n{share:.0%} right", False, None)]
            for guess, sample in wrong:
                pixels = torch.empty(3, size, size, dtype=torch.uint8)
                # Read again from the shards: the pixels of a pass are not kept.
                samples.fill(sample, pixels)
                row.append((name(guess), True, pixels))
            rows.append(row)
        # Pictures tell an error of the labels from one of the model.
        title = "Worst classes: images that were taken for the class above them"
        save_figure(sheet(title, rows, height=1.6), path)


def examples(
    predictions_N3: np.ndarray, label: int, *, count: int
) -> list[tuple[int, int]]:
    """Predicted class and sample of wrong images of a class: the first one for each wrong class,
    the most frequent wrong class first.

    predictions_N3: label, predicted class and sample of every image.
    """
    of_class_N3 = predictions_N3[predictions_N3[:, 0] == label]
    wrong_N3 = of_class_N3[of_class_N3[:, 1] != label]

    # `unique` gives the first of equal rows, so the rows are put in the order of the split.
    wrong_N3 = wrong_N3[wrong_N3[:, 2].argsort()]
    guesses, first, counts = np.unique(
        wrong_N3[:, 1], return_index=True, return_counts=True
    )
    order = np.lexsort((guesses, -counts))[:count]
    samples = wrong_N3[first[order], 2]
    return list(zip(guesses[order].tolist(), samples.tolist(), strict=True))
