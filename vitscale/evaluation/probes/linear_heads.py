"""Linear probe: linear classifiers at many learning rates, in one pass over frozen features.

DINOv2's protocol (Oquab et al. 2023, `eval/linear.py`), with two differences: features are of the
evaluation's crop, without augmentation; and the best head is chosen on a part of the training set,
not on the split that is reported.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import permutation, stream_key
from vitscale.evaluation.interface.evaluation import (
    Evaluation,
    EvaluationSettingsBase,
    Output,
    Share,
    Subject,
)

# DINOv2: 1, 2 and 5 of every decade.
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class LinearHeadsSettings(EvaluationSettingsBase):
    name: Literal["linear_heads"] = "linear_heads"
    """Metrics: val/linear_top1 of the best head, val/linear_dev_top1, by which it was chosen,
    val/linear_lr, its learning rate, and val/linear_lr_at_end, 1 if that is the first or the last
    of the list."""
    metrics: ClassVar[tuple[str, ...]] = (
        "linear_top1",
        "linear_dev_top1",
        "linear_lr",
        "linear_lr_at_end",
    )
    learning_rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=RATES, min_length=1, strict=False
    )
    """One head each; for a batch of 256, scaled with the batch."""
    steps: int = Field(default=12_500, gt=0)
    """Steps of SGD, momentum 0.9, cosine to zero; 12,500 as DINOv2 does for ImageNet."""
    batch: int = Field(default=1024, gt=0)
    """Images per step over all ranks; at most the training set."""
    dev_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training set that is not trained on but chooses the best head."""
    inputs: Literal["features", "blocks"] = "features"
    """features: what the model's head sees. blocks: four inputs for each rate, the class token of
    the last block or of the last four, with and without the mean patch token, as DINOv2; ViTs with
    a class token only."""
    seed: int = Field(default=0, ge=0)
    """Of the first weights, the order of the images, and the part that chooses."""


class LinearHeads(Evaluation):
    """Features stay sharded over ranks; only gradients of the heads travel."""

    Settings = LinearHeadsSettings
    needs = "features"

    def check(self, subject: Subject) -> None:
        if self.settings.inputs not in subject.model.known_outputs:
            raise UserError(
                "this model has no class token in its last four blocks",
                where="evaluate: linear_heads: inputs",
                allowed="features",
                next_step="set inputs: features",
            )
        if subject.num_train < 2:
            raise UserError(
                "a linear probe needs two training images, one of them to choose the best head",
                where="evaluate: linear_heads",
                next_step="choose a larger training split",
            )

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks
        from vitscale.evaluation.features.linear_training import ParallelHeads, train_heads

        settings, device = self.settings, subject.model.world.device
        rates = settings.learning_rates
        output: Output = settings.inputs
        train, val = subject.train_features(output=output), subject.val_features(output=output)
        fit, dev = dev_split(subject.num_train, settings.dev_fraction, seed=settings.seed)
        is_dev = torch.from_numpy(np.isin(train.samples, dev))
        found = []  # dev and validation top-1 and rate of each head
        for columns in column_choices(train.values_ND.shape[1], output):
            fit_on = train.columns(columns)
            heads = ParallelHeads(
                len(settings.learning_rates),
                width=len(columns),
                num_classes=len(subject.val.classes),
                seed=settings.seed,
            )
            train_heads(
                heads,
                fit_on,
                chosen=fit,
                rates=settings.learning_rates,
                steps=settings.steps,
                batch=settings.batch,
                seed=settings.seed,
                device=device,
            )
            on_dev_H = heads.num_correct(fit_on.values_ND[is_dev], train.labels_N[is_dev])
            on_val_H = heads.num_correct(val.columns(columns).values_ND, val.labels_N)
            correct_2H = sum_over_ranks(torch.stack([on_dev_H, on_val_H])).tolist()
            found += list(zip(*correct_2H, settings.learning_rates, strict=True))
        on_dev, on_val, rate = max(found, key=lambda head: head[0])
        return {
            "linear_top1": Share(on_val, subject.val.num_samples),
            "linear_dev_top1": Share(on_dev, len(dev)),
            "linear_lr": rate,
            # Then a longer list may have a better one.
            "linear_lr_at_end": float(rate in (min(rates), max(rates))),
        }


def dev_split(num: int, fraction: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random samples to train on, and those that choose the head: at least one of each."""
    order = permutation(num, key=stream_key("dev split", seed))
    num_dev = min(max(1, round(num * fraction)), num - 1)
    return np.sort(order[num_dev:]), np.sort(order[:num_dev])


def column_choices(width: int, output: Output) -> list[np.ndarray]:
    """Columns of the features that each group of heads sees; see `ViT.block_features`."""
    columns = np.arange(width)
    if output == "features":
        return [columns]
    last, all_blocks, patches = np.split(columns, [width // 5, width // 5 * 4])
    blocks = np.concatenate([last, all_blocks])
    return [last, blocks, np.concatenate([last, patches]), columns]
