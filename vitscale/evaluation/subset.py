"""Accuracy on shards whose classes are some of the model's, in any order.

For ImageNet-V2, -A, -R and -Sketch, and for shards with another label map: classes are found by
name, and only those of the shards (or of a named set) compete.
"""

from __future__ import annotations

from typing import Literal

from vitscale.config.errors import UserError
from vitscale.data.label_spaces import known_space
from vitscale.evaluation.classes import ClassMap, column_of_each_class
from vitscale.evaluation.evaluation import (
    Outputs,
    PassEvaluation,
    SettingsBase,
    Share,
    Subject,
    check_head,
    columns_on,
)


class SubsetSettings(SettingsBase):
    name: Literal["subset"] = "subset"
    """Metrics: val/subset_top1, and val/subset_top5 of more than five classes."""
    classes: Literal["shards", "imagenet_1k", "imagenet_a", "imagenet_r"] = "shards"
    """Classes that compete: those of the shards' label map, or of a known set, also where the
    shards lack some. Class names such as 0, 1, 10 (the folders of ImageNet-V2) are positions in
    that set, shards: in ImageNet-1k."""
    allow_missing: bool = False
    """Count images of classes that the model lacks as wrong; false: an error. Models of
    ImageNet-21k lack one of the 1,000 classes."""


class Subset(PassEvaluation):
    Settings = SubsetSettings

    def check(self, subject: Subject) -> str:
        return self._columns(subject)[0].how

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        outputs, positions = self._columns(subject)
        self._columns_K = columns_on(subject, outputs.columns)
        self._position_C = columns_on(subject, positions.columns)
        # Right at 1 and at 5, images.
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        # A class that the model lacks has no output, and no logit that could win.
        logits_BK = outputs.values_BX[:, self._columns_K.clamp(min=0)]
        logits_BK = logits_BK.masked_fill(self._columns_K < 0, float("-inf"))
        labels_B = self._position_C[outputs.labels_B]
        best_BK = logits_BK.topk(min(5, logits_BK.shape[1])).indices

        # It never counts, even if it is among the best five of fewer than five.
        has_output_B = self._columns_K[labels_B] >= 0
        hits_BK = (best_BK == labels_B[:, None]) & has_output_B[:, None]
        at1_B = (logits_BK.argmax(dim=1) == labels_B) & has_output_B
        rows = torch.stack([at1_B, hits_BK.any(dim=1), torch.ones_like(at1_B)]).double()
        self._totals += (rows * outputs.weights_B).sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        at1, at5, images = sum_over_ranks(self._totals).tolist()
        metrics: dict[str, float] = {"subset_top1": Share(at1, images)}
        # With five classes or fewer every prediction is right at 5.
        if len(self._columns_K) > 5:
            metrics["subset_top5"] = Share(at5, images)
        return metrics

    def _columns(self, subject: Subject) -> tuple[ClassMap, ClassMap]:
        """The model's output for each class that competes, and the position among them of each
        class of the shards.

        Raises UserError where names do not fit.
        """
        # Positions and outputs are two matches: labels of the shards, and names of the model.
        check_head(subject, name="subset")
        shards = subject.val.classes
        competing = shards
        if self.settings.classes != "shards":
            competing = known_space(self.settings.classes)
        positions = column_of_each_class(competing, shards, num_outputs=len(competing))
        # A label without a place among the competing classes could not be scored.
        _refuse(
            positions.lacking(shards),
            problem=f"not among the classes of {self.settings.classes}",
            subject=subject,
            next_step="set classes of subset to shards, or data.path to other shards",
        )

        # A model that has none of them at all is a mistake, whatever may be missing.
        outputs = column_of_each_class(
            subject.classes, competing, num_outputs=subject.num_outputs
        )
        lacking = outputs.lacking(competing)
        problem = "not among the model's classes"
        if not self.settings.allow_missing:
            _refuse(
                lacking,
                problem=problem,
                subject=subject,
                next_step="set allow_missing of subset to true to count their images as wrong, "
                "or data.path to other shards",
            )
        if len(lacking) == len(competing):
            _refuse(lacking, problem=problem, subject=subject)
        return outputs, positions


def _refuse(
    names: list[str],
    *,
    problem: str,
    subject: Subject,
    next_step: str = "use other shards",
) -> None:
    if not names:
        return
    number = f"{len(names)} of {len(subject.val.classes)} classes"
    raise UserError(
        f"subset: {number} are {problem} (the first is {names[0]!r})",
        where=f"label map of {subject.val.folder}",
        next_step=next_step,
    )
