"""Accuracy, loss and calibration over exactly the split's samples, of all classes and of each.

Calibration: Guo et al. 2017, "On calibration of modern neural networks", sec. 2. Of a model with a
distillation token also the accuracy of each head (DeiT, table 3). Papers on Aircraft, Caltech-101,
Flowers and Pets often report the mean per class; those of ViT and VTAB the plain accuracy.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitscale.evaluation.evaluation import (
    Outputs,
    PassEvaluation,
    SettingsBase,
    Share,
    Subject,
    check_labels,
    columns_on,
    rows_of_all_ranks,
)

if TYPE_CHECKING:
    import torch

# Bins of equal width over the confidence, 0 to 1.
NUM_BINS = 15
# Of the sheet of predictions.
SHEET_ROWS = 4
SHEET_COLUMNS = 6
# Below the rank of every image, whose confidence is at most 1.
NOT_DRAWN = 2
PER_CLASS_NAME = "per_class.csv"


class ClassificationSettings(SettingsBase):
    name: Literal["classification"] = "classification"
    """Metrics: val/top1, val/top5 of more than five classes, val/loss (mean negative
    log-likelihood), val/ece, and val/class_mean_top1 over classes that have images. With a
    distillation token also val/cls_top1, val/dist_top1, and val/softmax_top1 of the heads' summed
    softmaxes. Files: per_class.csv, calibration.csv with one row per bin, and at the end
    predictions.png: the mistakes of which the model is surest, then other images."""


class Classification(PassEvaluation):
    Settings = ClassificationSettings

    def start(self, subject: Subject) -> None:
        import torch

        self._subject = subject
        columns = check_labels(subject, name="classification").columns
        self._columns_C = columns_on(subject, columns)

        # Sums over a million images in fp32 would be off in the digits that are shown.
        def zeros(*shape: int) -> torch.Tensor:
            device = subject.model.world.device
            return torch.zeros(shape, dtype=torch.float64, device=device)

        # Right at 5, and the loss.
        self._totals = zeros(2)
        # Right by the class head, the distillation head, and their summed softmaxes.
        self._by_head = zeros(3)
        # Rows: images, right ones.
        self._by_class = zeros(2, len(subject.val.classes))
        # Rows: images, right ones, sum of the confidence.
        self._by_bin = zeros(3, NUM_BINS)
        # Images to draw: rank among them, label, guess, sample, confidence.
        self._drawn_N5 = zeros(SHEET_ROWS * SHEET_COLUMNS, 5) - NOT_DRAWN

    def add(self, outputs: Outputs) -> None:
        import torch

        outputs = outputs.of(self._columns_C)
        labels_B = outputs.labels_B
        weights_B = outputs.weights_B.double()
        logs_BC = outputs.values_BX.double().log_softmax(dim=1)

        # Ranked by the logits: their logarithms of probabilities may be equal by rounding.
        best_BK = outputs.values_BX.topk(min(5, logs_BC.shape[1])).indices
        guesses_B = outputs.values_BX.argmax(dim=1)
        correct_B = (guesses_B == labels_B).double()
        at5_B = (best_BK == labels_B[:, None]).any(dim=1)
        loss_B = -logs_BC.gather(1, labels_B[:, None])[:, 0]
        self._totals += (torch.stack([at5_B.double(), loss_B]) * weights_B).sum(dim=1)

        ones_B = torch.ones_like(correct_B)
        counts_2B = torch.stack([ones_B, correct_B]) * weights_B
        self._by_class.index_add_(1, labels_B, counts_2B)

        # Bin m holds ((m - 1) / M, m / M].
        sure_B = logs_BC.gather(1, guesses_B[:, None])[:, 0].exp()
        bins_B = ((sure_B * NUM_BINS).ceil().long() - 1).clamp(0, NUM_BINS - 1)
        counts_3B = torch.stack([ones_B, correct_B, sure_B]) * weights_B
        self._by_bin.index_add_(1, bins_B, counts_3B)

        # The surest mistakes come first, then the images that are right with the least confidence.
        order_B = torch.where(correct_B > 0, -sure_B, sure_B)
        order_B = torch.where(weights_B > 0, order_B, -NOT_DRAWN)
        samples_B = torch.from_numpy(outputs.samples_B).to(order_B)
        rows_B5 = torch.stack([order_B, labels_B, guesses_B, samples_B, sure_B], dim=1)
        self._drawn_N5 = _first(torch.cat([self._drawn_N5, rows_B5]))

        if outputs.heads_2BC is not None:
            summed_1BC = outputs.heads_2BC.softmax(dim=2).sum(dim=0, keepdim=True)
            guesses_3B = torch.cat([outputs.heads_2BC, summed_1BC]).argmax(dim=2)
            self._by_head += ((guesses_3B == labels_B) * weights_B).sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        subject = self._subject
        classes = subject.val.classes
        at5, loss = sum_over_ranks(self._totals).tolist()
        by_head = sum_over_ranks(self._by_head).tolist()
        images, correct = sum_over_ranks(self._by_class).long().tolist()
        bins = list(zip(*sum_over_ranks(self._by_bin).tolist(), strict=True))
        total = sum(images)

        rows: list[tuple[Any, ...]] = [("label", "class", "images", "correct", "top1")]
        shares = []
        for label, (name, number, right) in enumerate(
            zip(classes, images, correct, strict=True)
        ):
            rows.append((label, name, number, right, _mean(right, number)))
            # A class without images has no accuracy, so the mean is over the others.
            if number:
                shares.append(right / number)
        subject.write_table(PER_CLASS_NAME, rows)

        rows = [("low", "high", "images", "confidence", "accuracy")]
        for position, (number, right, sure) in enumerate(bins):
            low = f"{position / NUM_BINS:.6f}"
            high = f"{(position + 1) / NUM_BINS:.6f}"
            rows.append(
                (low, high, f"{number:.0f}", _mean(sure, number), _mean(right, number))
            )
        subject.write_table("calibration.csv", rows)

        drawn_N5 = _first(rows_of_all_ranks(self._drawn_N5)).cpu()
        title = (
            f"{sum(correct):,} of {total:,} images are right; mistakes are red, "
            "the surest first"
        )
        if subject.draws:
            subject.write(
                "predictions.png",
                lambda path: _draw(path, title, drawn_N5.tolist(), subject),
            )

        metrics: dict[str, float] = {"top1": Share(sum(correct), total)}
        # With five classes or fewer every prediction is right at 5.
        if len(classes) > 5:
            metrics["top5"] = Share(at5, total)
        metrics["loss"] = loss / total
        metrics["ece"] = sum(abs(right - sure) for _, right, sure in bins) / total
        metrics["class_mean_top1"] = sum(shares) / len(shares)
        if "heads" in subject.model.known_outputs:
            metrics["cls_top1"] = Share(by_head[0], total)
            metrics["dist_top1"] = Share(by_head[1], total)
            metrics["softmax_top1"] = Share(by_head[2], total)
        return metrics


def _first(rows_N5: torch.Tensor) -> torch.Tensor:
    """The rows that are drawn: those with the highest rank, of equal ones the first samples."""
    by_sample = rows_N5[:, 3].argsort()
    order = rows_N5[by_sample, 0].argsort(descending=True, stable=True)
    return rows_N5[by_sample[order]][: SHEET_ROWS * SHEET_COLUMNS]


def _draw(path: Path, title: str, rows: Sequence[Any], subject: Subject) -> None:
    """Draw images with the predicted class and its probability, of mistakes with the true class."""
    import torch

    from vitscale.evaluation.samples import EvaluationSamples
    from vitscale.evaluation.sheet import (
        SHOWN_PX,
        caption,
        save_figure,
        sheet,
        shown_size,
    )

    # As the model sees them, but large enough for people.
    size = shown_size(subject.image_size, at_least=SHOWN_PX)
    samples = EvaluationSamples(subject.val, settings=subject.data, image_size=size)
    cells = []
    for order, label, guess, sample, sure in rows:
        # There may be fewer images than cells.
        if order <= -NOT_DRAWN:
            continue
        image = torch.empty(3, size, size, dtype=torch.uint8)
        samples.fill(int(sample), image)
        # Names of ImageNet's classes are lists of synonyms, too long for a small picture.
        texts = [f"{sure:.0%} {subject.val.classes[int(guess)]}"]
        if guess != label:
            texts.append(f"is: {subject.val.classes[int(label)]}")
        text = "\n".join(caption(each, width=28, num_lines=2) for each in texts)
        cells.append((text, guess != label, image))
    table = [
        cells[start : start + SHEET_COLUMNS]
        for start in range(0, len(cells), SHEET_COLUMNS)
    ]
    save_figure(sheet(title, table, width=1.8), path)


def read_per_class(path: Path) -> dict[str, float]:
    """Class -> share of its images that are right. Raises ValueError, KeyError or csv.Error."""
    with open(path, newline="", encoding="utf-8") as file:
        shares = {
            row["class"]: float(row["top1"])
            for row in csv.DictReader(file)
            if row["top1"]
        }
    if not all(map(math.isfinite, shares.values())):
        raise ValueError("a share is not finite")
    return shares


def _mean(total: float, images: float) -> str:
    # Without images there is no share; a 0 would look like a bad one.
    return f"{total / images:.6f}" if images else ""
