"""Top-1 and top-5 accuracy and softmax loss over exactly the split's samples."""

from __future__ import annotations

from typing import ClassVar, Literal

from vitscale.evaluation.interface.evaluation import (
    EvaluationSettingsBase,
    Outputs,
    Share,
    Subject,
)
from vitscale.evaluation.interface.one_pass import LogitsEvaluation


class ClassificationSettings(EvaluationSettingsBase):
    name: Literal["classification"] = "classification"
    """Metrics: val/top1, val/loss, and val/top5 of more than five classes."""
    metrics: ClassVar[tuple[str, ...]] = ("top1", "top5", "loss")


class Classification(LogitsEvaluation):
    Settings = ClassificationSettings

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        # Correct at 1 and at 5, loss, samples.
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)
        self._has_top5 = len(subject.val.classes) > 5

    def add(self, outputs: Outputs) -> None:
        import torch
        import torch.nn.functional as F

        logits_BC, labels_B = outputs.values_BX, outputs.labels_B
        at1_B = logits_BC.argmax(dim=1) == labels_B
        best_BK = logits_BC.topk(min(5, logits_BC.shape[1])).indices
        at5_B = (best_BK == labels_B[:, None]).any(dim=1)
        loss_B = F.cross_entropy(logits_BC, labels_B, reduction="none")
        rows = (at1_B.float(), at5_B.float(), loss_B, torch.ones_like(loss_B))
        self._totals += (torch.stack(rows) * outputs.weights_B).double().sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        at1, at5, loss, samples = sum_over_ranks(self._totals).tolist()
        top1 = Share(at1, samples)
        if not self._has_top5:
            return {"top1": top1, "loss": loss / samples}
        return {"top1": top1, "top5": Share(at5, samples), "loss": loss / samples}
