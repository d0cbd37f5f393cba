"""The confusion matrix, and pictures of the images that the worst classes lose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from vitscale.evaluation.evaluation import EvaluationSettingsBase, Outputs, PassEvaluation, Subject

if TYPE_CHECKING:
    import torch


class ConfusionSettings(EvaluationSettingsBase):
    name: Literal["confusion"] = "confusion"
    """Metric: val/worst_classes_top1, the mean of the worst classes. Files: confusion.csv (cells of
    the matrix that are not 0, the most frequent confusions first), worst_classes.png."""
    num_classes: int = Field(default=10, gt=0)
    """How many classes are the worst ones."""
    num_examples: int = Field(default=8, gt=0)
    """Pictures of each of them."""


class Guesses(NamedTuple):
    """Predicted classes of images; each array has one entry per image."""

    label: np.ndarray
    guess: np.ndarray
    sample: np.ndarray


class Confusion(PassEvaluation):
    Settings = ConfusionSettings

    def start(self, subject: Subject) -> None:
        self._subject = subject
        self._rows: list[torch.Tensor] = []

    def add(self, outputs: Outputs) -> None:
        import torch

        guesses_B = outputs.values_BX.argmax(dim=1)
        samples_B = torch.from_numpy(outputs.samples_B).to(guesses_B.device)
        is_real_B = outputs.weights_B.long()
        self._rows.append(torch.stack([outputs.labels_B, guesses_B, samples_B, is_real_B], dim=1))

    def finish(self) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import gather_rows

        rows_N4 = gather_rows(torch.cat(self._rows)).cpu().numpy()
        self._rows = []
        label, guess, sample = rows_N4[rows_N4[:, 3] > 0, :3].T
        found, classes = Guesses(label, guess, sample), self._subject.val.classes
        images = np.bincount(label)
        right = np.bincount(label[label == guess], minlength=len(images))
        shares = {int(each): float(right[each] / images[each]) for each in np.flatnonzero(images)}
        worst = sorted(shares, key=lambda each: (shares[each], each))[: self.settings.num_classes]
        lines: list[tuple[object, ...]] = [("class", "predicted", "images")]
        lines += [(classes[a], classes[b], n) for a, b, n in cells(found)]
        self._subject.write_table("confusion.csv", lines)
        count = self.settings.num_examples
        chosen = [(each, shares[each], examples(found, each, count=count)) for each in worst]
        self._subject.write("worst_classes.png", lambda path: self._draw(path, found, chosen))
        return {"worst_classes_top1": float(np.mean([shares[each] for each in worst]))}

    def _draw(
        self, path: Path, found: Guesses, chosen: list[tuple[int, float, np.ndarray]]
    ) -> None:
        """One row for each class: label, accuracy, and images of it that were taken for others."""
        import torch

        from vitscale.data.samples import EvaluationSamples
        from vitscale.images.sheet import captioned_sheet, save_figure, short_names

        subject, size = self._subject, self._subject.image_size
        guesses = [int(found.guess[each]) for _, _, numbers in chosen for each in numbers]
        labels = [label for label, _, _ in chosen]
        names, note = short_names(subject.val.classes, [*labels, *guesses])
        samples = EvaluationSamples(subject.val, settings=subject.data, image_size=size)
        rows = []
        for label, share, numbers in chosen:
            row: list[Any] = [(f"{names[label]}\n{share:.0%} right", False, None)]
            for number in numbers:
                pixels = torch.empty(3, size, size, dtype=torch.uint8)
                samples.fill(int(found.sample[number]), pixels)
                row.append((names[int(found.guess[number])], True, pixels))
            rows.append(row)
        title = f"Worst classes: images that were taken for the class above them{note}"
        save_figure(captioned_sheet(title, rows, height=1.6), path)


def cells(found: Guesses) -> list[tuple[int, int, int]]:
    """(class, predicted class, images) of every cell that is not 0: confusions first, the most
    frequent ones first."""
    pairs, counts = np.unique(np.stack([found.label, found.guess]), axis=1, return_counts=True)
    rows = [(int(a), int(b), int(n)) for a, b, n in zip(*pairs, counts, strict=True)]
    return sorted(rows, key=lambda row: (row[0] == row[1], -row[2], row[:2]))


def examples(found: Guesses, label: int, *, count: int) -> np.ndarray:
    """Positions of wrong images of a class: one for each wrong class, the most frequent wrong class
    first, then a second one for each, and so on."""
    wrong = np.flatnonzero((found.label == label) & (found.guess != label))
    wrong = wrong[np.argsort(found.sample[wrong])]
    frequency = Counter(found.guess[wrong].tolist())
    seen, order = Counter[int](), []
    for position, guess in zip(wrong, found.guess[wrong].tolist(), strict=True):
        order.append((seen[guess], -frequency[guess], guess, position))
        seen[guess] += 1
    return np.array([position for *_, position in sorted(order)[:count]], np.int64)
