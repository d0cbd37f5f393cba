"""Top-1 and top-5 accuracy and softmax loss over exactly the split's samples.

Of a model with a distillation token also the accuracy of each head (DeiT, table 3).
"""

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
    """Metrics: val/top1, val/loss, and val/top5 of more than five classes. With a distillation
    token also val/cls_top1, val/dist_top1, and val/softmax_top1 of the heads' summed softmaxes."""
    metrics: ClassVar[tuple[str, ...]] = (
        *("top1", "top5", "loss"),
        *("cls_top1", "dist_top1", "softmax_top1"),
    )


class Classification(LogitsEvaluation):
    Settings = ClassificationSettings

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        # Correct at 1 and at 5, loss, samples.
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)
        # Correct by the class head, the distillation head, and their summed softmaxes.
        self._by_head = torch.zeros(3, dtype=torch.float64, device=device)
        self._has_two_heads = "heads" in subject.model.known_outputs
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
        if outputs.heads_2BC is not None:
            summed_1BC = outputs.heads_2BC.softmax(dim=2).sum(dim=0, keepdim=True)
            guesses_3B = torch.cat([outputs.heads_2BC, summed_1BC]).argmax(dim=2)
            self._by_head += ((guesses_3B == labels_B) * outputs.weights_B).double().sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        at1, at5, loss, samples = sum_over_ranks(self._totals).tolist()
        top1, mean_loss, by_head = Share(at1, samples), loss / samples, self._of_heads(samples)
        if not self._has_top5:
            return {"top1": top1, "loss": mean_loss, **by_head}
        return {"top1": top1, "top5": Share(at5, samples), "loss": mean_loss, **by_head}

    def _of_heads(self, samples: float) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        if not self._has_two_heads:
            return {}
        cls, dist, both = (Share(n, samples) for n in sum_over_ranks(self._by_head).tolist())
        return {"cls_top1": cls, "dist_top1": dist, "softmax_top1": both}
