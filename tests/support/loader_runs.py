"""Short runs of the loader on any number of ranks and workers, image by image."""

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from vitscale.data.loader import Batch, training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

GLOBAL_BATCH = 24
SEED = 7


def rank_batches_of(
    data: DataSettings,
    *,
    start: int = 0,
    stop: int,
    rank: int = 0,
    ranks: int = 1,
    accumulation: int = 1,
    image_size: int = 16,
) -> Generator[Batch, None, None]:
    """Training batches of one rank between two positions."""
    with training_batches(
        open_training_set(data, seed=SEED),
        settings=data,
        image_size=image_size,
        seed=SEED,
        start=start,
        stop=stop,
        rank=rank,
        world_size=ranks,
        micro_batch=data.global_batch // ranks // accumulation,
        pin_memory=False,
    ) as batches:
        yield from batches


@dataclass
class Run:
    """A training of `GLOBAL_BATCH` images per step; `more`: further settings of `data`."""

    path: Path | str
    more: dict[str, Any] = field(default_factory=dict)

    def settings(self, workers: int) -> DataSettings:
        values = {
            "path": str(self.path),
            "global_batch": GLOBAL_BATCH,
            "num_workers": workers,
        }
        return DataSettings.model_validate(values | self.more)

    def batches(
        self, *, ranks: int, workers: int, start: int, stop: int, accumulation: int = 1
    ) -> list[list[bytes]]:
        """Per global step the hash of each image with its label, in the order of positions.

        The loader is left two steps before its end. Asserts that all ranks make equally many steps.
        """
        micro_steps = (stop - start) * accumulation
        per_rank = []
        for rank in range(ranks):
            micro_batches = rank_batches_of(
                self.settings(workers),
                start=start * GLOBAL_BATCH,
                # Left early, as by a run that is stopped: workers have batches in hand.
                stop=(stop + 2) * GLOBAL_BATCH,
                rank=rank,
                ranks=ranks,
                accumulation=accumulation,
            )
            per_rank.append([*map(_digests, islice(micro_batches, micro_steps))])
            micro_batches.close()
        assert {len(batches) for batches in per_rank} == {micro_steps}

        # The contract of the order: micro-batch by micro-batch, in each rank by rank.
        steps = [[] for _ in range(start, stop)]
        for number in range(micro_steps):
            for batches in per_rank:
                steps[number // accumulation] += batches[number]
        return steps


def _digests(batch: Batch) -> list[bytes]:
    digests = []
    for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
        # With the label: right images in another order than their labels must not pass.
        content = image.numpy().tobytes() + bytes([label])
        digests.append(hashlib.sha256(content).digest())
    return digests


def server_pid() -> int:
    return forkserver._forkserver._forkserver_pid


def worker_pids() -> list[int]:
    pid = server_pid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]
