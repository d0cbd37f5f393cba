"""k-nearest-neighbour classification of features: evaluate a model without training a head.

Weighted vote over cosine similarities, as in Wu et al. 2018, sec. 3.4. Shapes: B queries of this
rank, Q queries of all ranks, N images in this rank's share of the bank, D width, K neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from vitscale.evaluation.interface.evaluation import Evaluation, EvaluationSettingsBase, Subject

if TYPE_CHECKING:
    import torch


class KnnSettings(EvaluationSettingsBase):
    name: Literal["knn"] = "knn"
    """Metric: val/knn_top1."""
    k: int = Field(default=20, gt=0)
    """Neighbours that vote."""
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

        from vitscale.distributed.world import gather_rows, sum_over_ranks

        world = subject.model.world
        bank_ND, bank_labels_N = self._bank(subject)
        num_classes = len(subject.val.classes)
        totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # correct, samples
        for features_BD, labels_B, weights_B, _ in subject.outputs(subject.val, self.needs):
            queries_QD = gather_rows(torch.nn.functional.normalize(features_BD, dim=1))
            similarity_QK, labels_QK = nearest(
                queries_QD, bank_ND, bank_labels_N, k=self.settings.k
            )
            # [ranks, Q, K] -> this rank's queries with the candidates of all ranks.
            own = slice(world.rank * len(labels_B), (world.rank + 1) * len(labels_B))
            shape = (world.world_size, len(queries_QD), -1)
            similarity = gather_rows(similarity_QK).view(shape)[:, own].transpose(0, 1).flatten(1)
            labels = gather_rows(labels_QK).view(shape)[:, own].transpose(0, 1).flatten(1)
            predicted_B = vote(
                similarity,
                labels,
                k=self.settings.k,
                temperature=self.settings.temperature,
                num_classes=num_classes,
            )
            correct_B = (predicted_B == labels_B).double() * weights_B
            totals += torch.stack([correct_B.sum(), weights_B.double().sum()])
        correct, samples = sum_over_ranks(totals).tolist()
        assert samples == subject.val.num_samples
        return {"knn_top1": correct / samples}

    def _bank(self, subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share: normalised features [N, D] and labels [N]; N may be 0."""
        import numpy as np
        import torch

        total = sum(part.num_samples for part in subject.train)
        count = min(self.settings.max_bank_images or total, total)
        chosen = np.arange(count) * total // count
        features, labels, first = [], [], 0
        for part in subject.train:
            samples = chosen[(chosen >= first) & (chosen < first + part.num_samples)] - first
            first += part.num_samples
            if not len(samples):
                continue
            for values_BD, labels_B, weights_B, _ in subject.outputs(
                part, self.needs, samples=samples
            ):
                real = weights_B > 0
                features.append(torch.nn.functional.normalize(values_BD[real], dim=1))
                labels.append(labels_B[real])
        return torch.cat(features), torch.cat(labels)


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
    k: int,
    temperature: float,
    num_classes: int,
) -> torch.Tensor:
    """The class [B] with the largest sum of exp(similarity / temperature) over the k nearest."""
    import torch

    similarity_BK, index_BK = similarity_BM.topk(min(k, similarity_BM.shape[1]), dim=1)
    # Relative to the nearest, so that no temperature overflows.
    weights_BK = torch.exp((similarity_BK - similarity_BK[:, :1]) / temperature)
    votes_BC = torch.zeros(len(similarity_BM), num_classes, device=similarity_BM.device)
    votes_BC.scatter_add_(1, labels_BM.gather(1, index_BK), weights_BK)
    return votes_BC.argmax(dim=1)
