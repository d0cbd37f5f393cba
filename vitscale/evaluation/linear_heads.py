"""Linear probe: linear classifiers at many learning rates, in one pass over frozen features.

DINOv2's protocol (Oquab et al. 2023, `eval/linear.py`: SGD with momentum 0.9, cosine to zero, no
warm-up, no decay), with two differences: features are of the evaluation's crop, without
augmentation; and the best head is chosen on a part of the training set, not on the split that is
reported. Shapes: N rows of this rank, B of them in a batch, H heads, D width, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import permutation, stream_key
from vitscale.evaluation.evaluation import Features, Probe, SettingsBase, Share, Subject
from vitscale.tracking.journal import item_progress

if TYPE_CHECKING:
    import torch

    from vitscale.distributed.world import World

# DINOv2: 1, 2 and 5 of every decade.
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
MOMENTUM = 0.9
INIT_STD = 0.01
# Rates are for this many images; larger batches scale them.
RATE_BATCH = 256


class LinearHeadsSettings(SettingsBase):
    name: Literal["linear_heads"] = "linear_heads"
    """Metrics: val/linear_top1 of the best head, val/linear_dev_top1, by which it was chosen,
    val/linear_lr, its learning rate, and val/linear_lr_at_end, 1 if that is the first or the last
    of the list."""
    learning_rates: tuple[PositiveFloat, ...] = Field(
        default=RATES, min_length=1, strict=False
    )
    """One head each; for a batch of 256, scaled with the batch."""
    steps: PositiveInt = 12_500
    """Steps of SGD, momentum 0.9, cosine to zero; 12,500 as DINOv2 does for ImageNet."""
    batch: PositiveInt = 1024
    """Images per step over all ranks; at most the training set."""
    dev_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training set that is not trained on but chooses the best head."""
    inputs: Literal["features", "blocks"] = "features"
    """features: what the model's head sees. blocks: four inputs for each rate, the class token of
    the last block or of the last four, with and without the mean patch token, as DINOv2; ViTs with
    a class token only."""
    seed: NonNegativeInt = 0
    """Seed of the first weights, the order of the images, and the part that chooses."""


class LinearHeads(Probe):
    """Features stay sharded over ranks; only gradients of the heads travel."""

    Settings = LinearHeadsSettings
    best_CD1: torch.Tensor | None = None
    """The best head of features, the bias in its last column; None before, and of blocks."""

    def check(self, subject: Subject) -> str:
        if self.settings.inputs not in subject.model.known_outputs:
            raise UserError(
                "this model has no class token, or fewer than four blocks",
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
        return super().check(subject)

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks

        settings = self.settings
        world = subject.model.world
        output = settings.inputs
        train = subject.features("train", output=output)
        val = subject.features("val", output=output)
        fit, dev = dev_split(
            subject.num_train, settings.dev_fraction, seed=settings.seed
        )

        heads = []  # dev and validation top-1, rate and weights of each head
        for columns in column_choices(train.values_ND.shape[1], output):
            train_part = replace(train, values_ND=train.values_ND[:, columns])
            val_part = replace(val, values_ND=val.values_ND[:, columns])
            weights_HCD = train_heads(
                train_part,
                settings,
                chosen=fit,
                num_classes=len(subject.val.classes),
                world=world,
            )

            # Every rank scores the rows that it holds.
            score = partial(logits, weights_HCD)
            dev_part = train_part.rows(np.isin(train_part.samples, dev))
            on_dev_H = dev_part.num_correct(score, world=world)
            on_val_H = val_part.num_correct(score, world=world)
            correct_2H = sum_over_ranks(torch.stack([on_dev_H, on_val_H])).tolist()
            heads += list(
                zip(*correct_2H, settings.learning_rates, weights_HCD, strict=True)
            )

        # Chosen on the dev part, since the best of many on the reported split is too good.
        on_dev, on_val, rate, best_CD1 = max(heads, key=lambda head: head[0])
        if output == "features":
            self.best_CD1 = best_CD1
        ends = (min(settings.learning_rates), max(settings.learning_rates))
        return {
            "linear_top1": Share(on_val, subject.val.num_samples),
            "linear_dev_top1": Share(on_dev, len(dev)),
            "linear_lr": rate,
            # Then a longer list may have a better one.
            "linear_lr_at_end": float(rate in ends),
        }


def dev_split(num: int, fraction: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random samples to train on, and those that choose the head: at least one of each."""
    # Both sides get an image, however few there are.
    order = permutation(num, key=stream_key("dev split", seed))
    num_dev = min(max(1, round(num * fraction)), num - 1)
    return np.sort(order[num_dev:]), np.sort(order[:num_dev])


def column_choices(
    width: int, inputs: Literal["features", "blocks"]
) -> list[np.ndarray]:
    """Columns of the features that each group of heads sees; see `ViT.block_features`."""
    columns = np.arange(width)
    if inputs == "features":
        return [columns]
    fifth = width // 5
    last, _, patches = np.split(columns, [fifth, 4 * fifth])
    return [last, columns[: 4 * fifth], np.concatenate([last, patches]), columns]


# ---- training -----------------------------------------------------------------------------------


def logits(weights_HCD: torch.Tensor, features_BD: torch.Tensor) -> torch.Tensor:
    """[B, H, C], of all heads in one matrix product."""
    num_heads, num_classes, _ = weights_HCD.shape
    weights_XD = weights_HCD.flatten(0, 1)
    logits_BX = features_BD @ weights_XD[:, :-1].T + weights_XD[:, -1]
    return logits_BX.view(-1, num_heads, num_classes)


def train_heads(
    features: Features,
    settings: LinearHeadsSettings,
    *,
    chosen: np.ndarray,
    num_classes: int,
    world: World,
) -> torch.Tensor:
    """Minimise each head's mean cross-entropy over the samples `chosen`. Collective.

    Returns [H, C, D + 1]; the last column is the bias.
    Weights start as N(0, 0.01), the same for all heads; biases as zero. Every rank adds the
    gradient of the rows that it holds of a global batch, so that the batches do not depend on the
    number of ranks. Epoch after epoch in a new order; batches run over the ends of epochs.
    """
    import torch
    import torch.nn.functional as F

    from vitscale.distributed.world import sum_over_ranks

    device = world.device
    batch = min(settings.batch, len(chosen))
    values_ND = features.values_ND.to(device)
    labels_N = features.labels_N.to(device)

    # From the number of a sample to its row on this rank; -1: another rank has it.
    row_of = np.full(int(chosen.max()) + 1, -1)
    is_known = features.samples < len(row_of)
    row_of[features.samples[is_known]] = np.flatnonzero(is_known)

    # The same first weights for all heads, so that only the rates differ.
    rates = settings.learning_rates
    rates_H = torch.tensor(rates, device=device) * (batch / RATE_BATCH)
    key = stream_key("linear heads", settings.seed)
    random = torch.Generator().manual_seed(key >> 1)
    first_CD = torch.empty(num_classes, values_ND.shape[1]).normal_(
        std=INIT_STD, generator=random
    )
    weights_HCD = F.pad(first_CD, (0, 1)).repeat(len(rates), 1, 1).to(device)

    momentum_HCD = torch.zeros_like(weights_HCD)
    batches = epoch_batches(len(chosen), batch=batch, seed=settings.seed)
    with item_progress(
        "train linear heads",
        total=settings.steps,
        unit="steps",
        is_shown=world.is_first,
    ) as advance:
        for step, drawn in zip(range(settings.steps), batches, strict=False):
            rows = row_of[chosen[drawn]]
            rows = torch.from_numpy(rows[rows >= 0]).to(device)
            # A rank that holds none of the batch adds zeros: all must take part in the sum.
            gradient_HCD = _gradient(
                weights_HCD, values_ND[rows], labels_N[rows], batch=batch
            )
            momentum_HCD.mul_(MOMENTUM).add_(sum_over_ranks(gradient_HCD))

            # Cosine to zero over all steps.
            factor_H = rates_H * (0.5 * (1 + math.cos(math.pi * step / settings.steps)))
            weights_HCD -= factor_H[:, None, None] * momentum_HCD
            advance(1)
    return weights_HCD


def _gradient(
    weights_HCD: torch.Tensor,
    values_BD: torch.Tensor,
    labels_B: torch.Tensor,
    *,
    batch: int,
) -> torch.Tensor:
    """Gradient of this rank's share of the mean cross-entropy over `batch` rows."""
    import torch.nn.functional as F

    logits_BHC = logits(weights_HCD, values_BD)
    # torch's softmax is several times slower on a CPU where there are few classes.
    error_BHC = (logits_BHC - logits_BHC.amax(dim=2, keepdim=True)).exp_()
    error_BHC /= error_BHC.sum(dim=2, keepdim=True)
    error_BHC -= F.one_hot(labels_B, error_BHC.shape[2])[:, None]
    gradient_XD = (error_BHC / batch).flatten(1).T @ F.pad(values_BD, (0, 1), value=1.0)
    return gradient_XD.view_as(weights_HCD)


def epoch_batches(num: int, *, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of endless epochs over `num` rows, each epoch in a new order."""
    rows = np.empty(0, np.int64)
    for epoch in itertools.count():
        # The rest of the last epoch and the beginning of this one share a batch.
        order = permutation(num, key=stream_key("linear heads", seed, epoch))
        rows = np.concatenate([rows, order])
        while len(rows) >= batch:
            yield rows[:batch]
            rows = rows[batch:]
