"""Linear probe: train a classifier on the features of a frozen model.

Source: He et al. 2022 (MAE), appendix A.1 and main_linprobe.py of facebookresearch/mae.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from vitscale.models.registry import costs_of
from vitscale.models.vit.settings import TransformerSettings
from vitscale.training.supervised import Supervised, SupervisedSettings

if TYPE_CHECKING:
    from vitscale.runs.training import TrainingRun
    from vitscale.training.loop import TrainingSession

# Training images that the statistics of the features are measured on: the batch of MAE's recipe.
NUM_MEASURED = 16_384
NOISE = ("dropout", "attention_dropout", "drop_path", "patch_dropout")


class LinearProbeSettings(SupervisedSettings):
    name: Literal["linear_probe"] = "linear_probe"  # type: ignore[assignment]  # narrowed on purpose
    """Only the head is trained, on standardised features. He et al. 2022 (MAE)."""


class LinearProbe(Supervised):
    """Mean and variance of the features are measured once, before the first step.

    MAE's BatchNorm (without parameters, eps 1e-6) takes them from every micro-batch instead: they
    are the same statistics of frozen features, but would depend on the number of ranks.
    """

    Settings = LinearProbeSettings

    def problems(self, run: TrainingRun) -> Iterator[tuple[str, str]]:
        yield from super().problems(run)
        model: Any = run.model
        if not isinstance(model, TransformerSettings):
            what = f"linear_probe reads the features of a transformer, not of {model.name}"
            yield ("model.name", f"{what}; choose another family or objective")
            return
        for name in ("representation_layer", "distillation_token"):
            if getattr(model, name):
                yield (f"model.{name}", "linear_probe trains one linear layer; set it to false")
        for name in NOISE:
            if getattr(model, name):
                yield (f"model.{name}", "the features of a linear probe are fixed; set it to 0")
        if run.engine.zero_stage != 0:
            what = "linear_probe trains the head alone, which leaves nothing to shard"
            yield ("engine.zero_stage", f"{what}; set it to 0")
        if run.optim.ema is not None:
            yield ("optim.ema", "linear_probe keeps no average of the head; set it to null")

    def extend_model(self, model: Any, arch: Any) -> None:
        from vitscale.models.objectives.linear_probe import freeze_trunk

        freeze_trunk(model)

    def num_parameters(self, arch: Any) -> int:
        return int(arch.width * arch.num_classes + arch.num_classes)

    def train_flops_per_image(self, arch: Any) -> int:
        """The trunk's forward pass and the head's whole step."""
        trunk = costs_of(arch).train_flops_per_image(replace(arch, num_classes=0)) // 3
        return int(trunk + 6 * arch.width * arch.num_classes)

    def activation_bytes_per_image(
        self, arch: Any, *, precision: str, activation_checkpointing: bool
    ) -> int:
        """Of one block: nothing is kept for a backward pass."""
        return costs_of(arch).activation_bytes_per_image(
            replace(arch, depth=1), precision=precision, activation_checkpointing=False
        )

    def start(self, session: TrainingSession) -> None:
        """Measure mean and variance of the features over evenly spaced training images."""
        import numpy as np
        import torch

        from vitscale.distributed.world import sum_over_ranks
        from vitscale.evaluation.interface.evaluation import Subject

        engine, parts = session.engine, session.data.parts
        subject = Subject(
            model=engine,
            train=tuple(parts),
            val=parts[0],
            data=session.run.data,
            image_size=session.arch.image_size,
            micro_batch=session.run.engine.max_micro_batch,
        )
        total = sum(part.num_samples for part in parts)
        count = min(NUM_MEASURED, total)
        chosen, first = np.arange(count) * total // count, 0
        # Rows: sum of weights, sums of the features, and of their squares.
        sums_3D = torch.zeros(
            3, session.arch.feature_width, dtype=torch.float64, device=session.world.device
        )
        engine.eval()
        for part in parts:
            samples = chosen[(chosen >= first) & (chosen < first + part.num_samples)] - first
            first += part.num_samples
            if not len(samples):
                continue
            for outputs in subject.outputs(part, "features", samples=samples):
                values, weights = outputs.values_BX.double(), outputs.weights_B.double()[:, None]
                weighted = (weights.expand_as(values), weights * values, weights * values.square())
                sums_3D += torch.stack([each.sum(dim=0) for each in weighted])
        engine.train()
        number, summed, squared = sum_over_ranks(sums_3D)
        mean = summed / number
        engine.set_buffer("head.0.mean", mean)
        engine.set_buffer("head.0.variance", (squared / number - mean.square()).clamp(min=0))
