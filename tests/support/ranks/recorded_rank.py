"""Run a script and record every training batch.

    python tests/support/ranks/recorded_rank.py pretrain/main.py ... (with VITSCALE_RECORD=FOLDER)

Owns: FOLDER/batches-RANK.jsonl, one line per micro-batch: the step (the first is 0), the
micro-step, the process id, and a hash of each image, as augmented and mixed, with its label.
Nothing else of the run changes.
Leaves out: comparing batches (`run_states`).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3

from vitscale.data.loader import Batch
from vitscale.training.loop import TrainingSession


def sample_hashes(batch: Batch) -> list[str]:
    """Eight hexadecimal digits for each image with its labels and mixing weight."""
    labels: list[Any] = [batch.labels.tolist()]
    if batch.mixed_labels is not None and batch.mix_lambda is not None:
        labels += [batch.mixed_labels.tolist(), batch.mix_lambda.tolist()]
    return [
        blake3(repr(own).encode() + image.contiguous().numpy().tobytes()).hexdigest(length=4)
        for image, *own in zip(batch.images, *labels, strict=True)
    ]


def record(folder: Path) -> None:
    """Record every batch of `TrainingSession` from now on."""
    own = TrainingSession._next_batch
    fd = os.open(
        folder / f"batches-{os.environ['RANK']}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )

    def next_batch(self: TrainingSession, step: int, micro_step: int) -> Batch:
        batch = own(self, step, micro_step)
        row = {
            "step": step,
            "micro_step": micro_step,
            "pid": os.getpid(),
            "samples": sample_hashes(batch),
        }
        # One write: a kill leaves whole lines.
        os.write(fd, (json.dumps(row) + "\n").encode())
        return batch

    TrainingSession._next_batch = next_batch  # type: ignore[method-assign]  # recording


def main() -> None:
    record(Path(os.environ["VITSCALE_RECORD"]))
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
