"""A subject whose features are given, for evaluations in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vitscale.distributed.world import World
from vitscale.evaluation.evaluation import Outputs, Subject

WORLD = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def split_of(features_ND: torch.Tensor, labels: list[int], *, name: str) -> Any:
    """A split whose index has the features, for `ArraySubject`."""
    return SimpleNamespace(
        split=name,
        fingerprint=f"{name} {len(labels)}",
        num_samples=len(labels),
        label=np.array(labels, dtype=np.int32),
        classes=tuple(map(str, range(max(labels) + 1))),
        features=features_ND,
    )


@dataclass(frozen=True, kw_only=True)
class ArraySubject(Subject):
    """Counts what is extracted, in batches of `micro_batch` with padding."""

    extracted: list[np.ndarray] = field(default_factory=list)

    def outputs(
        self, index: Any, output: str, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        assert samples is not None
        self.extracted.append(samples)
        for first in range(0, len(samples), self.micro_batch):
            chosen = samples[first : first + self.micro_batch]
            padded = np.resize(chosen, self.micro_batch)
            values = index.features[torch.from_numpy(padded)]
            labels = torch.from_numpy(index.label[padded].astype(np.int64))
            weights = (torch.arange(self.micro_batch) < len(chosen)).float()
            yield Outputs(values, labels, weights, padded)


def array_subject(train: Any, val: Any) -> ArraySubject:
    """train: one part, or several as a tuple."""
    model: Any = SimpleNamespace(world=WORLD, known_outputs=("logits", "features", "blocks"))
    unused: Any = None
    return ArraySubject(
        model=model,
        train=train if isinstance(train, tuple) else (train,),
        val=val,
        data=unused,
        image_size=8,
        micro_batch=4,
    )
