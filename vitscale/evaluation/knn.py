"""k-nearest-neighbour classification of features: evaluate a model without training a head.

Weighted vote over cosine similarities, as in Wu et al. 2018, sec. 3.4. Shapes: B queries, N images
in the bank, D width, K neighbours, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from vitscale.config.errors import print_note
from vitscale.config.section import Items
from vitscale.evaluation.evaluation import Probe, SettingsBase, Share, Subject

if TYPE_CHECKING:
    import torch


class KnnSettings(SettingsBase):
    name: Literal["knn"] = "knn"
    """Metrics: val/knn_top1, and val/knnK_top1 for each K of `also_k`."""
    k: PositiveInt = 20
    """Neighbours that vote; of a smaller bank all do, which a line says."""
    also_k: Items[PositiveInt] = ()
    """Further numbers of neighbours, from the same search. DINOv2: [10, 20, 100, 200]."""
    temperature: PositiveFloat = 0.07
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""
    max_bank_images: PositiveInt | None = 50_000
    """Training images to search, evenly spaced over the training set; null: all of it. Every rank
    holds their features."""


class Knn(Probe):
    """Every rank has the bank and searches for its own validation images."""

    Settings = KnnSettings

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch
        from torch.nn.functional import normalize

        from vitscale.distributed.world import sum_over_ranks

        settings = self.settings
        device = subject.model.world.device
        ks = (settings.k, *settings.also_k)
        samples = evenly_spaced(subject.num_train, at_most=settings.max_bank_images)
        # Each rank computed a part, and a neighbour may be in any of them.
        bank = subject.features("train", samples=samples).gathered()
        bank_ND = normalize(bank.values_ND.to(device), dim=1)
        labels_N = bank.labels_N.to(device)
        most = max(ks)
        if most > len(bank_ND) and subject.model.world.is_first:
            print_note(
                f"knn: {most} neighbours of a bank of {len(bank_ND)} images: all vote"
            )

        def votes(values_BD: torch.Tensor) -> torch.Tensor:
            """For each k and class the sum of exp(similarity / temperature) over the k nearest."""
            # One search for the largest k has the neighbours of all.
            similarity_BN = normalize(values_BD, dim=1) @ bank_ND.T
            similarity_BK, nearest_BK = similarity_BN.topk(
                min(most, len(bank_ND)), dim=1
            )
            labels_BK = labels_N[nearest_BK]

            # Relative to the nearest, so that no temperature overflows.
            distance_BK = similarity_BK - similarity_BK[:, :1]
            weights_BK = torch.exp(distance_BK / settings.temperature)
            zeros_BC = weights_BK.new_zeros(len(weights_BK), len(subject.val.classes))
            votes_BC = [
                zeros_BC.scatter_add(1, labels_BK[:, :k], weights_BK[:, :k]) for k in ks
            ]
            return torch.stack(votes_BC, dim=1)

        # Small parts, since the similarities to the whole bank are in memory at once.
        val = subject.features("val")
        correct = val.num_correct(votes, world=subject.model.world, size=256)
        shares = [
            Share(count, subject.val.num_samples)
            for count in sum_over_ranks(correct).tolist()
        ]
        metrics: dict[str, float] = {"knn_top1": shares[0]}
        for k, share in zip(settings.also_k, shares[1:], strict=True):
            metrics[f"knn{k}_top1"] = share
        return metrics


def evenly_spaced(total: int, *, at_most: int | None) -> np.ndarray:
    """Numbers of at most so many of `total` samples, int64, increasing."""
    # A class whose images lie together in the shards must not be missing in the bank.
    count = min(at_most or total, total)
    return np.arange(count) * total // count
