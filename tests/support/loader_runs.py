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
        span = {"start": start * GLOBAL_BATCH, "stop": (stop + 2) * GLOBAL_BATCH}
        per_rank = []
        for rank in range(ranks):
            layout = {"rank": rank, "ranks": ranks, "accumulation": accumulation}
            micro_batches = rank_batches_of(self.settings(workers), **span, **layout)
            per_rank.append(
                [_digests(batch) for batch in islice(micro_batches, micro_steps)]
            )
            micro_batches.close()
        assert {len(own) for own in per_rank} == {micro_steps}
        whole = [
            [image for own in per_rank for image in own[i]] for i in range(micro_steps)
        ]
        return [
            sum(whole[i : i + accumulation], [])
            for i in range(0, micro_steps, accumulation)
        ]


def _digests(batch: Batch) -> list[bytes]:
    images = zip(batch.images, batch.labels.tolist(), strict=True)
    return [
        hashlib.sha256(image.numpy().tobytes() + bytes([n])).digest()
        for image, n in images
    ]


def server_pid() -> int:
    pid = forkserver._forkserver._forkserver_pid
    return pid


def worker_pids() -> list[int]:
    pid = server_pid()
    return [
        int(each)
        for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
