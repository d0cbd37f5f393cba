"""A short run of the loader on any number of ranks and workers, image by image."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

GLOBAL_BATCH = 24
RANKS, WORKERS = (1, 2, 3, 4, 8), (0, 1, 2, 3)
GRID = [(ranks, workers) for ranks in RANKS for workers in WORKERS]
SEED = 7


@dataclass
class Run:
    """Settings of `data`, besides the number of workers."""

    path: Path | str
    image_size: int = 16
    remote: dict[str, Any] = field(default_factory=dict)
    mixture: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    """Numbers of samples substituted so far."""

    def settings(self, workers: int) -> DataSettings:
        values = {
            "path": str(self.path),
            "global_batch": GLOBAL_BATCH,
            "num_workers": workers,
            "remote": self.remote,
            "mixture": self.mixture,
        }
        return DataSettings.model_validate(values | self.more)

    def batches(
        self,
        *,
        ranks: int,
        workers: int,
        start: int,
        stop: int,
        accumulation: int = 1,
        planned: int = 0,
    ) -> list[list[bytes]]:
        """Per global step the hash of each image with its label, in the order of positions.

        planned: the step that the loader would go to, were it not left at `stop`; 0: `stop`.
        Asserts that all ranks make equally many steps.
        """
        data = self.settings(workers)
        per_rank = []
        for rank in range(ranks):
            loader = training_batches(
                open_training_set(data, seed=SEED),
                settings=data,
                image_size=self.image_size,
                seed=SEED,
                start=start * GLOBAL_BATCH,
                stop=(planned or stop) * GLOBAL_BATCH,
                rank=rank,
                world_size=ranks,
                micro_batch=GLOBAL_BATCH // ranks // accumulation,
                pin_memory=False,
            )
            with loader as batches:
                own = []
                for batch in islice(batches, (stop - start) * accumulation):
                    self.unreadable += [each.sample for each in batch.unreadable]
                    images = zip(batch.images, batch.labels.tolist(), strict=True)
                    own.append([_digest(image.numpy().tobytes(), label) for image, label in images])
                per_rank.append(own)
        micro_steps = (stop - start) * accumulation
        assert {len(own) for own in per_rank} == {micro_steps}
        whole = [[image for own in per_rank for image in own[i]] for i in range(micro_steps)]
        return [
            [image for micro in whole[i : i + accumulation] for image in micro]
            for i in range(0, micro_steps, accumulation)
        ]


def server_pid() -> int:
    """The server of this process's loader workers."""
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # private
    return pid


def worker_pids() -> list[int]:
    """The running loader workers of this process."""
    pid = server_pid()
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _digest(pixels: bytes, label: int) -> bytes:
    return hashlib.sha256(pixels + bytes([label])).digest()


def same_run(
    run: Run, first: tuple[int, int], second: tuple[int, int], *, stop: int, steps: int
) -> list[list[bytes]]:
    """Batches of a run that stops after `stop` steps on one layout (ranks, workers) and resumes
    on another."""
    head = run.batches(ranks=first[0], workers=first[1], start=0, stop=stop)
    return head + run.batches(ranks=second[0], workers=second[1], start=stop, stop=steps)
