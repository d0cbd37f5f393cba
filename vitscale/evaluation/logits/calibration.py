"""Calibration: expected calibration error and negative log-likelihood.

Source: Guo et al. 2017, "On calibration of modern neural networks", sec. 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from vitscale.distributed.atomic_files import write_text
from vitscale.evaluation.interface.evaluation import EvaluationSettingsBase, Outputs, Subject
from vitscale.evaluation.interface.one_pass import LogitsEvaluation


class CalibrationSettings(EvaluationSettingsBase):
    name: Literal["calibration"] = "calibration"
    """Metrics: val/ece, val/nll. File: calibration.csv, one row per bin."""
    metrics: ClassVar[tuple[str, ...]] = ("ece", "nll")
    num_bins: int = Field(default=15, gt=0)
    """Bins of equal width over the confidence, 0 to 1."""


class Calibration(LogitsEvaluation):
    Settings = CalibrationSettings

    def start(self, subject: Subject) -> None:
        import torch

        self._subject, device = subject, subject.model.world.device
        # Rows: images, sum of the confidence, correct ones.
        shape = (3, self.settings.num_bins)
        self._bins = torch.zeros(shape, dtype=torch.float64, device=device)
        self._nll = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        weights_B, labels_B = outputs.weights_B.double(), outputs.labels_B
        logs_BC = outputs.values_BX.double().log_softmax(dim=1)
        logs_B, guesses_B = logs_BC.max(dim=1)
        confidence_B = logs_B.exp()
        # Bin m holds ((m - 1) / M, m / M].
        numbers_B = (confidence_B * self.settings.num_bins).ceil().long() - 1
        numbers_B = numbers_B.clamp(0, self.settings.num_bins - 1)
        correct_B = (guesses_B == labels_B).double()
        rows = torch.stack([torch.ones_like(confidence_B), confidence_B, correct_B])
        self._bins.index_add_(1, numbers_B, rows * weights_B)
        self._nll -= (logs_BC.gather(1, labels_B[:, None])[:, 0] * weights_B).sum()

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        images, confidence, correct = sum_over_ranks(self._bins).tolist()
        total = sum(images)
        gaps = (abs(right - sure) for right, sure in zip(correct, confidence, strict=True))
        rows = list(zip(images, confidence, correct, strict=True))
        self._subject.write("calibration.csv", lambda path: _write(path, rows))
        return {"ece": sum(gaps) / total, "nll": float(sum_over_ranks(self._nll)) / total}


def _write(path: Path, rows: list[tuple[float, float, float]]) -> None:
    lines = ["low,high,images,confidence,accuracy\n"]
    for number, (images, confidence, correct) in enumerate(rows):
        low, high = number / len(rows), (number + 1) / len(rows)
        means = f"{confidence / images:.6f},{correct / images:.6f}" if images else ","
        lines.append(f"{low:.6f},{high:.6f},{images:.0f},{means}\n")
    write_text(path, "".join(lines))
