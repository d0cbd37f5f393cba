"""Top-1 accuracy and softmax loss over exactly the split's samples."""

from __future__ import annotations

from typing import Literal

from vitscale.evaluation.interface.evaluation import Evaluation, EvaluationSettingsBase, Subject


class ClassificationSettings(EvaluationSettingsBase):
    name: Literal["classification"] = "classification"
    """Metrics: val/top1, val/loss."""


class Classification(Evaluation):
    Settings = ClassificationSettings
    needs = "logits"

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch
        import torch.nn.functional as F

        from vitscale.distributed.world import sum_over_ranks

        device = subject.model.world.device
        totals = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, samples
        for logits_BC, labels_B, weights_B in subject.outputs(subject.val, self.needs):
            correct_B = (logits_BC.argmax(dim=1) == labels_B).float()
            loss_B = F.cross_entropy(logits_BC, labels_B, reduction="none")
            rows = torch.stack([correct_B, loss_B, torch.ones_like(loss_B)])
            totals += (rows * weights_B).double().sum(dim=1)
        correct, loss, samples = sum_over_ranks(totals).tolist()
        num_samples = subject.val.num_samples
        assert samples == num_samples, f"evaluated {samples} of {num_samples} samples"
        return {"top1": correct / samples, "loss": loss / samples}
