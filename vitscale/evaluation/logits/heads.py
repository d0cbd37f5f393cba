"""Top-1 accuracy of each head of a model with a distillation token (DeiT, table 3)."""

from __future__ import annotations

from typing import ClassVar, Literal

from vitscale.evaluation.interface.evaluation import (
    EvaluationSettingsBase,
    Outputs,
    Share,
    Subject,
)
from vitscale.evaluation.interface.one_pass import LogitsEvaluation


class HeadsSettings(EvaluationSettingsBase):
    name: Literal["heads"] = "heads"
    """Metrics: val/cls_top1, val/dist_top1, and val/softmax_top1 of their summed softmaxes."""
    metrics: ClassVar[tuple[str, ...]] = ("cls_top1", "dist_top1", "softmax_top1")


class Heads(LogitsEvaluation):
    Settings = HeadsSettings
    needs = "heads"

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)  # right by each, samples

    def add(self, outputs: Outputs) -> None:
        import torch

        heads_2BC = outputs.values_BX
        summed_BC = heads_2BC.softmax(dim=2).sum(dim=0)
        guesses_3BC = torch.cat([heads_2BC, summed_BC[None]])
        correct_3B = (guesses_3BC.argmax(dim=2) == outputs.labels_B).float()
        rows = torch.cat([correct_3B, torch.ones_like(correct_3B[:1])])
        self._totals += (rows * outputs.weights_B).double().sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        *correct, samples = sum_over_ranks(self._totals).tolist()
        cls, dist, summed = (Share(number, samples) for number in correct)
        return {"cls_top1": cls, "dist_top1": dist, "softmax_top1": summed}
