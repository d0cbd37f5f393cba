"""Subjects of evaluations whose model output is given, in padded batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vitscale.data.index import SplitIndex
from vitscale.data.settings import DataSettings
from vitscale.distributed.world import World
from vitscale.evaluation.evaluation import Output, Outputs, Subject


def split_of(
    labels: Sequence[int], classes: Sequence[str], *, folder: Path = Path("shards")
) -> SplitIndex:
    """A split without tars."""
    num = len(labels)
    return SplitIndex(
        folder=folder,
        split="val",
        shard_of=np.zeros(num, np.int32),
        offset=np.arange(num),
        length=np.ones(num, np.int64),
        label=np.array(labels, np.int32),
        shard_paths=(),
        shard_lengths=(num,),
        classes=tuple(classes),
        fingerprint="",
        label_map_sha256="",
    )


@dataclass(frozen=True, kw_only=True)
class GivenOutputs(Subject):
    """The model's output for sample i is row i of `values`."""

    values: torch.Tensor

    def outputs(
        self, index: SplitIndex, output: Output, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        total, size = index.num_samples, self.micro_batch
        for first in range(0, total, size):
            numbers = np.arange(first, first + size)
            weights = torch.from_numpy((numbers < total).astype(np.float32))
            rows = np.minimum(numbers, total - 1)
            labels = torch.from_numpy(index.label[rows].astype(np.int64))
            yield Outputs(self.values[torch.from_numpy(rows)], labels, weights, rows)


def given_outputs(
    world: World,
    values: torch.Tensor,
    labels: Sequence[int],
    *,
    classes: Sequence[str] | None = None,
    model_classes: Sequence[str] | None = None,
    folder: Path | None = None,
    val: SplitIndex | None = None,
) -> GivenOutputs:
    """values: [N, outputs]. The last batch of three is padded if N is no multiple of 3."""
    model: Any = SimpleNamespace(world=world, known_outputs=("logits",))
    names = tuple(classes or map(str, range(values.shape[1])))
    return GivenOutputs(
        values=values,
        model=model,
        train=(),
        val=val or split_of(labels, names),
        data=DataSettings(path="shards", global_batch=3),
        image_size=8,
        micro_batch=3,
        num_outputs=values.shape[1],
        classes=None if model_classes is None else tuple(model_classes),
        folder=folder,
    )
