"""Accuracy of each class, and its mean over classes.

Papers on Aircraft, Caltech-101, Flowers and Pets often report the mean per class; those of ViT and
VTAB the plain accuracy.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from vitscale.distributed.atomic_files import write_text
from vitscale.evaluation.interface.evaluation import EvaluationSettingsBase, Outputs, Subject
from vitscale.evaluation.interface.one_pass import LogitsEvaluation


class PerClassSettings(EvaluationSettingsBase):
    name: Literal["per_class"] = "per_class"
    """Metric: val/class_mean_top1, over classes that have images. File: per_class.csv."""
    metrics: ClassVar[tuple[str, ...]] = ("class_mean_top1",)


class PerClass(LogitsEvaluation):
    Settings = PerClassSettings

    def start(self, subject: Subject) -> None:
        import torch

        self._subject, device = subject, subject.model.world.device
        # Rows: images, correct ones.
        shape = (2, len(subject.val.classes))
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        correct_B = (outputs.values_BX.argmax(dim=1) == outputs.labels_B).double()
        rows = torch.stack([torch.ones_like(correct_B), correct_B]) * outputs.weights_B
        self._counts.index_add_(1, outputs.labels_B, rows)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        images, correct = sum_over_ranks(self._counts).long().tolist()
        rows = list(zip(self._subject.val.classes, images, correct, strict=True))
        self._subject.write("per_class.csv", lambda path: _write_table(path, rows))
        shares = [right / number for _, number, right in rows if number]
        return {"class_mean_top1": sum(shares) / len(shares)}


def _write_table(path: Path, rows: Sequence[tuple[str, int, int]]) -> None:
    """rows: name, images, correct ones; the label is the row's number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["label", "class", "images", "correct", "top1"])
    for label, (name, images, correct) in enumerate(rows):
        share = f"{correct / images:.6f}" if images else ""
        writer.writerow([label, name, images, correct, share])
    write_text(path, file.getvalue())
