"""kNN of features equals brute force, however the bank is sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitscale.evaluation.interface.evaluation import Outputs
from vitscale.evaluation.probes.knn import Knn, KnnSettings, nearest, vote

K, TEMPERATURE, CLASSES = 5, 0.07, 4


def normalized(rows: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, 8, generator=generator), dim=1)


def brute_force(query: torch.Tensor, bank: torch.Tensor, labels: torch.Tensor, *, k: int) -> int:
    similar = sorted(
        (float(torch.dot(query, row)), int(label)) for row, label in zip(bank, labels, strict=True)
    )
    votes = [0.0] * CLASSES
    for similarity, label in similar[::-1][:k]:
        votes[label] += math.exp(similarity / TEMPERATURE)
    return votes.index(max(votes))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_sharded_knn_equals_brute_force(num_shards: int) -> None:
    bank, queries = normalized(60, seed=0), normalized(40, seed=1)
    labels = torch.arange(60) % CLASSES
    candidates = [
        nearest(queries, bank[shard::num_shards], labels[shard::num_shards], k=K)
        for shard in range(num_shards)
    ]
    predicted = vote(
        torch.cat([similarity for similarity, _ in candidates], dim=1),
        torch.cat([found for _, found in candidates], dim=1),
        k=K,
        temperature=TEMPERATURE,
        num_classes=CLASSES,
    )
    assert predicted.tolist() == [brute_force(query, bank, labels, k=K) for query in queries]


def test_a_bank_smaller_than_k_votes_with_all_it_has() -> None:
    bank, queries = normalized(3, seed=0), normalized(20, seed=1)
    labels = torch.tensor([1, 2, 1])
    similarity, found = nearest(queries, bank, labels, k=K)
    predicted = vote(similarity, found, k=K, temperature=TEMPERATURE, num_classes=CLASSES)
    assert predicted.tolist() == [brute_force(query, bank, labels, k=K) for query in queries]


def test_a_tiny_temperature_means_the_nearest_neighbour_alone() -> None:
    bank, queries = normalized(30, seed=0), normalized(20, seed=1)
    labels = torch.arange(30) % CLASSES
    similarity, found = nearest(queries, bank, labels, k=K)
    predicted = vote(similarity, found, k=K, temperature=1e-6, num_classes=CLASSES)
    assert predicted.tolist() == labels[(queries @ bank.T).argmax(dim=1)].tolist()


def test_the_bank_is_evenly_spaced_over_all_parts() -> None:
    taken: list[list[int]] = []

    def outputs(part: Any, output: str, *, samples: Any) -> Iterator[Outputs]:
        taken.append(samples.tolist())
        labels = torch.tensor([*samples.tolist(), 99])  # the last one is padding
        weights = (labels != 99).float()
        numbers = labels.numpy()
        yield Outputs(3 * torch.eye(8)[: len(labels)], labels, weights, numbers)

    parts = (SimpleNamespace(num_samples=6), SimpleNamespace(num_samples=4))
    subject: Any = SimpleNamespace(train=parts, outputs=outputs)
    features, labels = Knn(KnnSettings(max_bank_images=4))._bank(subject)
    assert taken == [[0, 2, 5], [1]]
    assert labels.tolist() == [0, 2, 5, 1]
    assert torch.equal(features.norm(dim=1), torch.ones(4))
