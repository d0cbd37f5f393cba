"""Accuracy on shards whose classes are some of the model's, in any order.

For ImageNet-V2, -A, -R and -Sketch, and for shards with another label map: classes are found by
name, and only those of the shards (or of a named set) compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vitscale.config.errors import UserError
from vitscale.data.label_spaces import known_space, space_of_length
from vitscale.evaluation.evaluation import (
    Outputs,
    PassEvaluation,
    SettingsBase,
    Share,
    Subject,
    check_head,
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

    def check(self, subject: Subject) -> None:
        self._columns(subject)

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        columns, labels = self._columns(subject)
        self._columns_K = torch.tensor(columns, device=device)
        self._position_C = torch.tensor(labels, device=device)
        # Right at 1 and at 5, images.
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        logits_BK = outputs.values_BX[:, self._columns_K.clamp(min=0)]
        logits_BK = logits_BK.masked_fill(self._columns_K < 0, float("-inf"))
        labels_B = self._position_C[outputs.labels_B]
        best_BK = logits_BK.topk(min(5, logits_BK.shape[1])).indices
        # A class that the model lacks never counts, even if it is among the best five.
        lacking_B = self._columns_K[labels_B] < 0
        hits_BK = (best_BK == labels_B[:, None]) & ~lacking_B[:, None]
        at1_B = (logits_BK.argmax(dim=1) == labels_B) & ~lacking_B
        rows = torch.stack([at1_B, hits_BK.any(dim=1), torch.ones_like(at1_B)]).double()
        self._totals += (rows * outputs.weights_B).sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        at1, at5, images = sum_over_ranks(self._totals).tolist()
        if len(self._columns_K) <= 5:
            return {"subset_top1": Share(at1, images)}
        return {"subset_top1": Share(at1, images), "subset_top5": Share(at5, images)}

    def _columns(self, subject: Subject) -> tuple[list[int], list[int]]:
        """The model's output for each class that competes (-1: lacking), and for each label of the
        shards the position of its class among them.

        Raises UserError where names do not fit.
        """
        check_head(subject, name="subset")
        shards, chosen = subject.val.classes, self.settings.classes
        if all(name.isascii() and name.isdigit() for name in shards):
            space = dict(enumerate(known_space("imagenet_1k" if chosen == "shards" else chosen)))
            shards = tuple(space.get(int(name), name) for name in shards)
        competing = shards if chosen == "shards" else known_space(chosen)
        position = {name: number for number, name in enumerate(competing)}
        _refuse(
            [name for name in shards if name not in position],
            what=f"not among the classes of {chosen}",
            subject=subject,
            next_step="set classes of subset to shards, or data.path to other shards",
        )
        outputs = {name: number for number, name in enumerate(model_classes(subject))}
        lacking = [name for name in competing if name not in outputs]
        _refuse(
            [] if self.settings.allow_missing else lacking,
            what="not among the model's classes",
            subject=subject,
            next_step="set allow_missing of subset to true to count their images as wrong, or "
            "data.path to other shards",
        )
        return [outputs.get(name, -1) for name in competing], [position[name] for name in shards]


def model_classes(subject: Subject) -> Sequence[str]:
    """Names of the model's outputs: its own, or those of the release of ImageNet with as many.

    Raises UserError when neither is known.
    """
    space = space_of_length(subject.num_outputs)
    if subject.classes is None and space is None:
        raise UserError(
            f"subset: the names of the model's {subject.num_outputs} classes are unknown",
            where="init",
            allowed="a run folder with classes.json, or as many classes as a release of ImageNet",
            next_step="evaluate the run folder, or use shards with the model's label map",
        )
    return subject.classes or known_space(str(space))


def _refuse(names: list[str], *, what: str, subject: Subject, next_step: str) -> None:
    if names:
        number = f"{len(names)} of {len(subject.val.classes)} classes"
        what = f"subset: {number} are {what} (the first is {names[0]!r})"
        raise UserError(what, where=f"label map of {subject.val.folder}", next_step=next_step)
