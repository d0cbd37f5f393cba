"""kNN of features equals brute force."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.engine.subjects import array_subject, split_of
from vitscale.evaluation.knn import Knn, KnnSettings, evenly_spaced

TEMPERATURE, CLASSES = 0.07, 4


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


def test_the_bank_is_evenly_spaced() -> None:
    assert evenly_spaced(10, at_most=4).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(3, at_most=4).tolist() == evenly_spaced(3, at_most=None).tolist()


@pytest.mark.parametrize("num_bank", [60, 4])
def test_every_k_equals_brute_force(num_bank: int) -> None:
    bank, queries = 3 * normalized(num_bank, seed=0), 2 * normalized(40, seed=1)
    labels = [number % CLASSES for number in range(num_bank)]
    truth = [number % CLASSES for number in range(40)]
    subject = array_subject(split_of(bank, labels), split_of(queries, truth))
    settings = KnnSettings(k=5, also_k=(1, 50, 10), temperature=TEMPERATURE, max_bank_images=None)
    found = Knn(settings).metrics(subject)
    names = {"knn_top1": 5, "knn1_top1": 1, "knn50_top1": 50, "knn10_top1": 10}
    assert found.keys() == names.keys()
    for name, k in names.items():
        guesses = [brute_force(query, bank / 3, torch.tensor(labels), k=k) for query in queries / 2]
        correct = sum(guess == label for guess, label in zip(guesses, truth, strict=True))
        assert found[name] == correct / 40
    assert num_bank < 5 or len(set(found.values())) > 1
