"""Top-1 accuracy of each head of a model with a distillation token (DeiT, table 3)."""

from __future__ import annotations

from typing import Literal

from vitscale.evaluation.interface.evaluation import Evaluation, EvaluationSettingsBase, Subject


class HeadsSettings(EvaluationSettingsBase):
    name: Literal["heads"] = "heads"
    """Metrics: val/cls_top1, val/dist_top1, and val/softmax_top1 of their summed softmaxes."""


class Heads(Evaluation):
    Settings = HeadsSettings
    needs = "heads"

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks

        device = subject.model.world.device
        totals = torch.zeros(4, dtype=torch.float64, device=device)  # correct by each, samples
        for heads_2BC, labels_B, weights_B in subject.outputs(subject.val, self.needs):
            summed_BC = heads_2BC.softmax(dim=2).sum(dim=0)
            guesses_3BC = torch.cat([heads_2BC, summed_BC[None]])
            correct_3B = (guesses_3BC.argmax(dim=2) == labels_B).float()
            rows = torch.cat([correct_3B, torch.ones_like(correct_3B[:1])])
            totals += (rows * weights_B).double().sum(dim=1)
        *correct, samples = sum_over_ranks(totals).tolist()
        assert samples == subject.val.num_samples
        cls, dist, summed = (number / samples for number in correct)
        return {"cls_top1": cls, "dist_top1": dist, "softmax_top1": summed}
