"""The confusion matrix, and pictures of the images that the worst classes lose."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from vitscale.distributed.atomic_files import write_text
from vitscale.evaluation.interface.evaluation import EvaluationSettingsBase, Outputs, Subject
from vitscale.evaluation.interface.one_pass import LogitsEvaluation

if TYPE_CHECKING:
    import torch

NAME_WIDTH, NAME_LINES = 18, 2


class ConfusionSettings(EvaluationSettingsBase):
    name: Literal["confusion"] = "confusion"
    """Metric: val/worst_classes_top1, the mean of the worst classes. Files: confusion.csv (cells of
    the matrix that are not 0, the most frequent confusions first), worst_classes.png."""
    metrics: ClassVar[tuple[str, ...]] = ("worst_classes_top1",)
    num_classes: int = Field(default=10, gt=0)
    """How many classes are the worst ones."""
    num_examples: int = Field(default=8, gt=0)
    """Pictures of each of them."""


class Guesses(NamedTuple):
    """Predicted classes of images; each array has one entry per image."""

    label: np.ndarray
    guess: np.ndarray
    sample: np.ndarray


class Confusion(LogitsEvaluation):
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
        shares = class_shares(found)
        worst = sorted(shares, key=lambda each: (shares[each], each))[: self.settings.num_classes]
        self._subject.write("confusion.csv", lambda path: _write_cells(path, found, classes))
        self._subject.write("worst_classes.png", lambda path: self._draw(path, found, worst))
        return {"worst_classes_top1": float(np.mean([shares[each] for each in worst]))}

    def _draw(self, path: Path, found: Guesses, worst: list[int]) -> None:
        """One row for each of the worst classes: images of it that were taken for others."""
        from vitscale.images.sheet import caption, common_start

        classes, shares, rows = self._subject.val.classes, class_shares(found), []
        chosen = {
            label: examples(found, label, count=self.settings.num_examples) for label in worst
        }
        taken_for = {int(found.guess[each]) for numbers in chosen.values() for each in numbers}
        start = common_start(classes[each] for each in {*worst, *taken_for})

        def shown(label: int) -> str:
            name = classes[label].removeprefix(start)
            return caption(name, width=NAME_WIDTH, num_lines=NAME_LINES)

        for label, numbers in chosen.items():
            titles = [shown(int(found.guess[each])) for each in numbers]
            name = f"{shown(label)}\n{shares[label]:.0%} right"
            rows.append((name, found.sample[numbers].tolist(), titles))
        title = "Worst classes: images that were taken for the class above them"
        title += f'; "{start}" is left out' if start else ""
        draw_samples(self._subject, rows, title=title, path=path)


def class_shares(found: Guesses) -> dict[int, float]:
    """Accuracy of each class that has images."""
    images = np.bincount(found.label)
    right = np.bincount(found.label[found.label == found.guess], minlength=len(images))
    return {int(each): float(right[each] / images[each]) for each in np.flatnonzero(images)}


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
    guesses, first, counts = np.unique(found.guess[wrong], return_inverse=True, return_counts=True)
    seen = np.zeros(len(guesses), np.int64)
    turn = np.empty(len(wrong), np.int64)
    for position, guess in enumerate(first):
        turn[position] = seen[guess]
        seen[guess] += 1
    return wrong[np.lexsort((first, -counts[first], turn))][:count]


def _write_cells(path: Path, found: Guesses, classes: tuple[str, ...]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["class", "predicted", "images"])
    writer.writerows((classes[a], classes[b], n) for a, b, n in cells(found))
    write_text(path, file.getvalue())


def draw_samples(
    subject: Subject, rows: Sequence[tuple[str, list[int], list[str]]], *, title: str, path: Path
) -> None:
    """Draw images of the validation split with titles as a PNG.

    rows: name, numbers of the samples, and the title of each; may be empty.

    Raises OSError and UserError.
    """
    import torch
    from matplotlib.figure import Figure

    from vitscale.data.samples import EvaluationSamples
    from vitscale.images.sheet import save_figure

    samples = EvaluationSamples(subject.val, settings=subject.data, image_size=subject.image_size)
    pixels = torch.empty(3, subject.image_size, subject.image_size, dtype=torch.uint8)
    columns = max((len(numbers) for _, numbers, _ in rows), default=0) + 1
    figure = Figure(figsize=(columns * 1.3, len(rows) * 1.6 + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    for row, (name, numbers, titles) in enumerate(rows):
        axes = figure.add_subplot(len(rows), columns, row * columns + 1)
        axes.set_axis_off()
        axes.text(1, 0.5, name, ha="right", va="center", fontsize=9, parse_math=False)
        for column, (number, text) in enumerate(zip(numbers, titles, strict=True), start=2):
            samples.fill(number, pixels)
            axes = figure.add_subplot(len(rows), columns, row * columns + column)
            axes.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_axis_off()
            # Class names come from folder names: never let matplotlib read them as mathematics.
            axes.set_title(text, fontsize=8, color="#c0392b", parse_math=False)
    save_figure(figure, path)
