"""The confusion matrix, and pictures of the images that the worst classes lose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field

from vitscale.evaluation.evaluation import EvaluationSettingsBase, Outputs, PassEvaluation, Subject

if TYPE_CHECKING:
    import torch

NAME_WIDTH, NAME_LINES = 18, 2


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
        from matplotlib.figure import Figure

        from vitscale.data.samples import EvaluationSamples
        from vitscale.images.sheet import caption, common_start, save_figure

        subject, size = self._subject, self._subject.image_size
        classes = subject.val.classes
        named = {label for label, _, _ in chosen}
        named |= {int(found.guess[each]) for _, _, numbers in chosen for each in numbers}
        start = common_start(classes[each] for each in named)

        def shown(label: int) -> str:
            # Class names come from folder names: never let matplotlib read them as mathematics.
            name = classes[label].removeprefix(start)
            return caption(name, width=NAME_WIDTH, num_lines=NAME_LINES)

        samples = EvaluationSamples(subject.val, settings=subject.data, image_size=size)
        pixels = torch.empty(3, size, size, dtype=torch.uint8)
        columns = max((len(numbers) for _, _, numbers in chosen), default=0) + 1
        figure = Figure(figsize=(columns * 1.3, len(chosen) * 1.6 + 0.5), layout="constrained")
        title = "Worst classes: images that were taken for the class above them"
        title += f'; "{start}" is left out' if start else ""
        figure.suptitle(title, fontsize=10, parse_math=False)
        for row, (label, share, numbers) in enumerate(chosen):
            first = row * columns + 1
            axes = figure.add_subplot(len(chosen), columns, first)
            axes.set_axis_off()
            text = f"{shown(label)}\n{share:.0%} right"
            axes.text(1, 0.5, text, ha="right", va="center", fontsize=9, parse_math=False)
            for place, number in enumerate(numbers, start=first + 1):
                samples.fill(int(found.sample[number]), pixels)
                axes = figure.add_subplot(len(chosen), columns, place)
                axes.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
                axes.set_axis_off()
                text = shown(int(found.guess[number]))
                axes.set_title(text, fontsize=8, color="#c0392b", parse_math=False)
        save_figure(figure, path)


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
