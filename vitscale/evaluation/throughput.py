"""Images per second of the model alone, without reading images."""

from __future__ import annotations

import time
from typing import ClassVar, Literal

from pydantic import Field

from vitscale.evaluation.interface.evaluation import (
    Evaluation,
    EvaluationSettingsBase,
    Output,
    Subject,
)
from vitscale.images.size import rows_and_columns


class ThroughputSettings(EvaluationSettingsBase):
    name: Literal["throughput"] = "throughput"
    """Metric: val/images_per_s, the sum over ranks."""
    metrics: ClassVar[tuple[str, ...]] = ("images_per_s",)
    num_batches: int = Field(default=20, gt=0)
    """Batches that are timed."""
    warmup_batches: int = Field(default=3, ge=0)
    """Batches before them."""


class Throughput(Evaluation):
    """Random pixels on the device through preprocessing and forward pass."""

    Settings = ThroughputSettings
    needs: ClassVar[Output] = "logits"
    in_training = False

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks

        model, device = subject.model, subject.model.world.device
        shape = (subject.micro_batch, 3, *rows_and_columns(subject.image_size))
        images_B3SS = torch.randint(256, shape, dtype=torch.uint8, device=device)
        forward = model.logits if subject.num_outputs else model.features
        settings = self.settings
        # All ranks compute at once, as they do in an evaluation.
        sum_over_ranks(torch.zeros(1, device=device))
        for number in range(settings.warmup_batches + settings.num_batches):
            if number == settings.warmup_batches:
                _wait(device)
                start = time.perf_counter()
            forward(images_B3SS)
        _wait(device)
        rate = settings.num_batches * subject.micro_batch / (time.perf_counter() - start)
        return {"images_per_s": float(sum_over_ranks(torch.tensor(rate, device=device)))}


def _wait(device: object) -> None:
    """Until the device has computed what was queued."""
    import torch

    assert isinstance(device, torch.device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
