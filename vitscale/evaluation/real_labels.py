"""Accuracy by ImageNet-ReaL: every validation image has a set of labels, maybe empty.

Source: Beyer et al. 2020, "Are we done with ImageNet?". A prediction is right if it is in the set;
images with an empty set are left out (3,163 of 50,000). The labels come with timm.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Literal

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex, sample_keys
from vitscale.data.label_spaces import known_space, timm_file
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

NUM_IMAGES = 50_000
NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


class RealLabelsSettings(SettingsBase):
    name: Literal["real_labels"] = "real_labels"
    """Metrics: val/real_top1, val/real_top5. For ImageNet's validation images under their original
    names."""


class RealLabels(PassEvaluation):
    Settings = RealLabelsSettings

    def check(self, subject: Subject) -> str:
        # Both raise where the evaluation cannot be done.
        matched = _imagenet_columns(subject)
        image_numbers(subject.val)
        return matched.how

    def start(self, subject: Subject) -> None:
        import torch

        device = subject.model.world.device
        self._columns_C = columns_on(subject, _imagenet_columns(subject).columns)
        labels_NL = _label_table()[image_numbers(subject.val)]
        self._labels_NL = torch.from_numpy(labels_NL).to(device)
        # Right at 1, right at 5, images with labels.
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        import torch

        samples = torch.from_numpy(outputs.samples_B).to(self._labels_NL.device)
        labels_BL = self._labels_NL[samples]
        is_scored_B = (labels_BL >= 0).any(dim=1)

        # The padding of a set, -1, is no class, so an empty set has no hit.
        best_B5 = outputs.of(self._columns_C).values_BX.topk(5).indices
        hits_B5 = (best_B5[:, :, None] == labels_BL[:, None, :]).any(dim=2)
        rows = torch.stack([hits_B5[:, 0], hits_B5.any(dim=1), is_scored_B]).double()
        self._totals += (rows * outputs.weights_B).sum(dim=1)

    def finish(self) -> dict[str, float]:
        from vitscale.distributed.world import sum_over_ranks

        at1, at5, scored = sum_over_ranks(self._totals).tolist()
        return {"real_top1": Share(at1, scored), "real_top5": Share(at5, scored)}


def _imagenet_columns(subject: Subject) -> ClassMap:
    """The model's output for each class of ImageNet-1k. Raises UserError if it lacks one."""
    check_head(subject, name="real_labels")
    classes = known_space("imagenet_1k")
    num_outputs = subject.num_outputs
    matched = column_of_each_class(subject.classes, classes, num_outputs=num_outputs)
    # An image of a class that the model lacks could only be wrong.
    lacking = matched.lacking(classes)
    if lacking:
        raise UserError(
            f"real_labels needs the {len(classes):,} classes of ImageNet-1k, and {len(lacking):,} "
            f"of them are none of the model's {num_outputs:,} (the first is {lacking[0]!r})",
            where="evaluate",
            next_step="remove real_labels, or fine-tune on labels.space=imagenet_1k",
        )
    return matched


def image_numbers(index: SplitIndex) -> np.ndarray:
    """int64 [N]: each sample's number among ImageNet's validation images, from 0.

    Raises UserError where a key does not have the original name.
    """
    # The sets are listed by the number in an image's name, not by a key.
    numbers = []
    for key in sample_keys(index, range(index.num_samples)):
        match = NAME.search(key)
        if match is None or not 1 <= int(match[1]) <= NUM_IMAGES:
            raise UserError(
                f"real_labels: the key {key!r} has no name such as ILSVRC2012_val_00000293",
                where=index.folder,
                allowed="ImageNet's validation images under their original names",
                next_step="make the shards from the original files, or remove real_labels",
            )
        numbers.append(int(match[1]) - 1)
    return np.array(numbers, np.int64)


@cache
def _label_table() -> np.ndarray:
    """int64 [50,000, labels]: the set of each image, filled up with -1."""
    path = timm_file("imagenet_real_labels.json", where="evaluate")
    sets = json.loads(path.read_text())
    # The rows have one length, so that a GPU can look up the sets of a batch.
    table = np.full((len(sets), max(map(len, sets))), -1, np.int64)
    for row, labels in zip(table, sets, strict=True):
        row[: len(labels)] = labels
    return table
