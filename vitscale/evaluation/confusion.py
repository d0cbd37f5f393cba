"""The confusion matrix, and the accuracy of the worst classes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from vitscale.evaluation.evaluation import (
    Outputs,
    PassEvaluation,
    SettingsBase,
    Subject,
    check_labels,
    columns_on,
    rows_of_all_ranks,
)

if TYPE_CHECKING:
    import torch


class ConfusionSettings(SettingsBase):
    name: Literal["confusion"] = "confusion"
    """Metric: val/worst_classes_top1, the mean of the worst classes. File: confusion.csv (cells of
    the matrix that are not 0, the most frequent confusions first)."""
    num_classes: PositiveInt = 10
    """Number of worst classes."""


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
        # Padding is dropped at the end: to select on a GPU would wait for it at every batch.
        is_real_B = outputs.weights_B.long()
        self._rows.append(torch.stack([outputs.labels_B, guesses_B, is_real_B], dim=1))

    def finish(self) -> dict[str, float]:
        import torch

        # The cells of 21,000 classes would be a matrix of 477 million; those that occur are few.
        rows_N3 = rows_of_all_ranks(torch.cat(self._rows)).cpu()
        self._rows = []
        predictions_N2 = rows_N3[rows_N3[:, 2] > 0, :2].tolist()
        images = Counter(label for label, _ in predictions_N2)
        cells = Counter(map(tuple, predictions_N2))
        self._write_cells(cells)

        shares = [cells[label, label] / number for label, number in images.items()]
        worst = sorted(shares)[: self.settings.num_classes]
        return {"worst_classes_top1": sum(worst) / len(worst)}

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
