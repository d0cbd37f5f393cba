"""Train many linear classifiers on the same features at once.

DINOv2's protocol (`eval/linear.py`): SGD with momentum 0.9, cosine to zero, no warm-up, no decay.
Shapes: N rows of this rank, B of them in a batch, H heads, D width, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vitscale.distributed.random_numbers import permutation, stream_key
from vitscale.distributed.world import sum_over_ranks
from vitscale.evaluation.features.rows import Features

MOMENTUM = 0.9
INIT_STD = 0.01
# Rates are for this many images; larger batches scale them.
RATE_BATCH = 256
# Images scored at once.
CHUNK = 4096


class ParallelHeads:
    """One linear layer per learning rate; all are computed as one matrix product."""

    def __init__(self, num_heads: int, *, width: int, num_classes: int, seed: int) -> None:
        """Weights are N(0, 0.01), the same for all heads; biases are zero."""
        random = torch.Generator().manual_seed(stream_key("linear heads", seed) >> 1)
        weights_CD = torch.empty(num_classes, width).normal_(std=INIT_STD, generator=random)
        # The last column is the bias, of a constant feature of one.
        self.weights_HCD = F.pad(weights_CD, (0, 1)).repeat(num_heads, 1, 1)

    def logits(self, features_BD: torch.Tensor) -> torch.Tensor:
        """[B, H, C]; the features are on the device of the weights."""
        num_heads, num_classes, _ = self.weights_HCD.shape
        # One matrix product for all heads.
        logits_BX = _with_constant(features_BD) @ self.weights_HCD.flatten(0, 1).T
        return logits_BX.view(-1, num_heads, num_classes)

    def num_correct(self, features_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """Count this rank's rows that each head predicts right: float64 [H]."""
        device = self.weights_HCD.device
        correct_H = torch.zeros(len(self.weights_HCD), dtype=torch.float64, device=device)
        for values_BD, labels_B in zip(
            features_ND.split(CHUNK), labels_N.split(CHUNK), strict=True
        ):
            guesses_BH = self.logits(values_BD.to(device)).argmax(dim=2)
            correct_H += (guesses_BH == labels_B.to(device)[:, None]).sum(dim=0)
        return correct_H


def train_heads(
    heads: ParallelHeads,
    features: Features,
    *,
    chosen: np.ndarray,
    rates: Sequence[float],
    steps: int,
    batch: int,
    seed: int,
    device: torch.device,
) -> None:
    """Minimise each head's mean cross-entropy over the samples `chosen`. Collective.

    rates: one per head, for a batch of 256. Every rank adds the gradient of the rows that it holds
    of a global batch, so that the batches do not depend on the number of ranks. Epoch after epoch
    in a new order; batches run over the ends of epochs.
    """
    batch = min(batch, len(chosen))
    values_ND, labels_N = features.values_ND.to(device), features.labels_N.to(device)
    row_of = np.full(int(chosen.max()) + 1, -1)
    held = features.samples[features.samples < len(row_of)]
    row_of[held] = np.arange(len(held))
    rates_H = torch.tensor(rates, device=device) * (batch / RATE_BATCH)
    weights_HCD = heads.weights_HCD = heads.weights_HCD.to(device)
    momentum_HCD = torch.zeros_like(weights_HCD)
    for step in range(steps):
        rows = row_of[chosen[_positions(step * batch, batch, num=len(chosen), seed=seed)]]
        own = torch.from_numpy(rows[rows >= 0]).to(device)
        gradient_HCD = _gradient(heads, values_ND[own], labels_N[own], batch=batch)
        momentum_HCD.mul_(MOMENTUM).add_(sum_over_ranks(gradient_HCD))
        factor_H = rates_H * (0.5 * (1 + math.cos(math.pi * step / steps)))
        weights_HCD -= factor_H[:, None, None] * momentum_HCD


def _gradient(
    heads: ParallelHeads, values_BD: torch.Tensor, labels_B: torch.Tensor, *, batch: int
) -> torch.Tensor:
    """Of this rank's share of the mean cross-entropy over `batch` rows; zero without rows."""
    logits_BHC = heads.logits(values_BD)
    # torch's softmax is several times slower on a CPU where there are few classes.
    error_BHC = (logits_BHC - logits_BHC.amax(dim=2, keepdim=True)).exp_()
    error_BHC /= error_BHC.sum(dim=2, keepdim=True)
    error_BHC -= F.one_hot(labels_B, error_BHC.shape[2])[:, None]
    gradient_XD = (error_BHC / batch).flatten(1).T @ _with_constant(values_BD)
    return gradient_XD.view_as(heads.weights_HCD)


def _with_constant(features_BD: torch.Tensor) -> torch.Tensor:
    return F.pad(features_BD, (0, 1), value=1.0)


def _positions(first: int, count: int, *, num: int, seed: int) -> np.ndarray:
    """Rows at the positions `first` to `first + count` of endless epochs over `num` rows."""
    positions = np.arange(first, first + count)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(positions // num):
        order = permutation(num, key=stream_key("linear heads", seed, int(epoch)))
        is_in = positions // num == epoch
        rows[is_in] = order[positions[is_in] % num]
    return rows
