"""Evaluations of a model on a split.

Owns: top-1 over exactly the split's samples, on any number of ranks.
Leaves out: when to evaluate (the loops).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from vitscale.data.loader import Batch
from vitscale.distributed.world import sum_over_ranks
from vitscale.engine.engine import Engine


@torch.no_grad()
def evaluate(
    engine: Engine, batches: Iterable[Batch], *, num_samples: int, prefix: str = "val/"
) -> dict[str, float]:
    """Top-1 accuracy and softmax loss, each a mean over `num_samples` images. Collective.

    Every rank passes equally many batches; padding has weight 0. Figures: PREFIXtop1, PREFIXloss.
    """
    engine.eval()
    device = engine.world.device
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # correct, loss, samples
    for cpu_batch in batches:
        batch = cpu_batch.to(device)
        logits_BC = engine.logits(batch.images).float()
        correct_B = (logits_BC.argmax(dim=1) == batch.labels).float()
        loss_B = F.cross_entropy(logits_BC, batch.labels, reduction="none")
        rows = torch.stack([correct_B, loss_B, torch.ones_like(loss_B)])
        totals += (rows * batch.weights).double().sum(dim=1)
    engine.train()
    correct, loss, samples = sum_over_ranks(totals).tolist()
    assert samples == num_samples, f"evaluated {samples} of {num_samples} samples"
    return {f"{prefix}top1": correct / samples, f"{prefix}loss": loss / samples}
