"""k-nearest-neighbour classification of features: evaluate a model without training a head.

Weighted vote over cosine similarities, as in Wu et al. 2018, sec. 3.4. Shapes: B queries of this
rank, Q queries of all ranks, N images in this rank's share of the bank, D width, K neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from vitscale.evaluation.evaluation import Evaluation, EvaluationSettingsBase, Share, Subject

if TYPE_CHECKING:
    import torch

# Queries of each rank in one search.
QUERIES = 256


class KnnSettings(EvaluationSettingsBase):
    name: Literal["knn"] = "knn"
    """Metrics: val/knn_top1, and val/knnK_top1 for each K of `also_k`."""
    k: int = Field(default=20, gt=0)
    """Neighbours that vote."""
    also_k: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(), strict=False)
    """Further numbers of neighbours, from the same search. DINOv2: [10, 20, 100, 200]."""
    temperature: float = Field(default=0.07, gt=0)
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""
    max_bank_images: int | None = Field(default=50_000, gt=0)
    """Training images to search, evenly spaced over the training set; null: all of it."""


class Knn(Evaluation):
    """The bank and the queries are sharded over ranks; only features travel, no images."""

    Settings = KnnSettings
    needs = "features"

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch
        from torch.nn.functional import normalize

        from vitscale.distributed.world import gather_rows, sum_over_ranks

        world, ks = subject.model.world, (self.settings.k, *self.settings.also_k)
        bank = subject.features(
            "train", samples=evenly_spaced(subject.num_train, at_most=self.settings.max_bank_images)
        )
        bank_ND = normalize(bank.values_ND.to(world.device), dim=1)
        bank_labels_N = bank.labels_N.to(world.device)
        # Correct by each k, samples.
        totals = torch.zeros(len(ks) + 1, dtype=torch.float64, device=world.device)
        queries = subject.features("val")
        for values_BD, labels_B, weights_B in queries.batches(world, size=QUERIES):
            queries_QD = gather_rows(normalize(values_BD, dim=1))
            similarity_QK, labels_QK = nearest(queries_QD, bank_ND, bank_labels_N, k=max(ks))
            # [ranks, Q, K] -> this rank's queries with the candidates of all ranks.
            own = slice(world.rank * len(labels_B), (world.rank + 1) * len(labels_B))
            shape = (world.world_size, len(queries_QD), -1)
            similarity = gather_rows(similarity_QK).view(shape)[:, own].transpose(0, 1).flatten(1)
            labels = gather_rows(labels_QK).view(shape)[:, own].transpose(0, 1).flatten(1)
            guesses_KB = vote(
                similarity,
                labels,
                ks=ks,
                temperature=self.settings.temperature,
                num_classes=len(subject.val.classes),
            )
            correct_KB = (guesses_KB == labels_B).double() * weights_B
            totals += torch.cat([correct_KB.sum(dim=1), weights_B.double().sum()[None]])
        *correct, samples = sum_over_ranks(totals).tolist()
        assert samples == subject.val.num_samples
        shares = [Share(number, samples) for number in correct]
        found = zip(self.settings.also_k, shares[1:], strict=True)
        return {"knn_top1": shares[0], **{f"knn{k}_top1": share for k, share in found}}


def evenly_spaced(total: int, *, at_most: int | None) -> np.ndarray:
    """Numbers of at most so many of `total` samples, int64, increasing."""
    count = min(at_most or total, total)
    return np.arange(count) * total // count


def nearest(
    queries_QD: torch.Tensor, bank_ND: torch.Tensor, bank_labels_N: torch.Tensor, *, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities and labels of each query's k nearest images, both [Q, k].

    A bank with fewer than k images is filled up with similarity -inf and label 0.
    """
    import torch.nn.functional as F

    similarity_QN = queries_QD @ bank_ND.T
    missing = max(0, k - len(bank_ND))
    similarity_QN = F.pad(similarity_QN, (0, missing), value=float("-inf"))
    labels_N = F.pad(bank_labels_N, (0, missing))
    similarity_QK, index_QK = similarity_QN.topk(k, dim=1)
    return similarity_QK, labels_N[index_QK]


def vote(
    similarity_BM: torch.Tensor,
    labels_BM: torch.Tensor,
    *,
    ks: Sequence[int],
    temperature: float,
    num_classes: int,
) -> torch.Tensor:
    """For each k the class with the largest sum of exp(similarity / temperature) over the k
    nearest: [len(ks), B]."""
    import torch

    most = min(max(ks), similarity_BM.shape[1])
    similarity_BK, index_BK = similarity_BM.topk(most, dim=1)
    labels_BK = labels_BM.gather(1, index_BK)
    # Relative to the nearest, so that no temperature overflows.
    weights_BK = torch.exp((similarity_BK - similarity_BK[:, :1]) / temperature)
    votes_BC = torch.zeros(len(similarity_BM), num_classes, device=similarity_BM.device)
    guesses, counted = {}, 0
    for k in sorted(set(ks)):
        votes_BC.scatter_add_(1, labels_BK[:, counted:k], weights_BK[:, counted:k])
        guesses[k], counted = votes_BC.argmax(dim=1), k
    return torch.stack([guesses[k] for k in ks])
