"""Few-shot: the draws of training images, and accuracies against a slow version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engine.subjects import array_subject, split_of
from vitscale.evaluation.few_shot import (
    FewShot,
    FewShotSettings,
    class_orders,
    first_of_each,
    fit_ridge,
)

LABELS = np.array([2, 0, 0, 2, 2, 4, 0, 2, 4, 0])


def direct_scores(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, *, num_classes: int, l2: float
) -> np.ndarray:
    """The normal equations, solved by LU."""
    mean, std = train.mean(axis=0), train.std(axis=0) + 1e-5
    x, z = (
        np.concatenate([(rows - mean) / std, np.full((len(rows), 1), 100.0)], axis=1)
        for rows in (train, test)
    )
    targets = np.where(np.arange(num_classes) == labels[:, None], 1.0, -1.0)
    weights = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)
    return np.asarray(z @ weights)


@pytest.mark.parametrize("num_images", [7, 24, 25, 300])
def test_ridge_equals_a_direct_solve(num_images: int) -> None:
    random = np.random.default_rng(0)
    train = random.normal(3, 5, (num_images, 24)).astype(np.float32)
    test = random.normal(3, 5, (9, 24)).astype(np.float32)
    labels = random.integers(0, 4, num_images)
    fitted = fit_ridge(torch.from_numpy(train), torch.from_numpy(labels), num_classes=5, l2=2.0**10)
    expected = direct_scores(
        train.astype(np.float64), labels, test.astype(np.float64), num_classes=5, l2=2.0**10
    )
    found = fitted(torch.from_numpy(test))[:, 0].numpy()
    assert np.abs(found - expected).max() < 1e-6


def test_draws_are_those_of_big_vision_and_nested() -> None:
    random = np.random.default_rng(1)
    expected = [random.permutation(np.where(LABELS == label)[0]) for label in (0, 2, 4)]
    orders = class_orders(LABELS, seed=1)
    assert [each.tolist() for each in orders] == [each.tolist() for each in expected]
    three, one = first_of_each(orders, 3), first_of_each(orders, 1)
    assert set(one) < set(three)
    assert np.bincount(LABELS[three]).tolist() == [3, 0, 3, 0, 2]  # a short class gives all it has


def test_accuracies_equal_a_direct_solve_of_every_draw() -> None:
    random = np.random.default_rng(3)
    labels = [number % 4 for number in range(60)]
    centres = random.normal(0, 1, (4, 6))
    values = [(centres[labels] + random.normal(0, 1.5, (60, 6))).astype(np.float32) for _ in "ab"]
    train, val = (split_of(torch.from_numpy(each), labels) for each in values)
    subject = array_subject(train, val)
    found = FewShot(FewShotSettings(shots=(1, 3), num_draws=2)).metrics(subject)
    for shots in (1, 3):
        shares = []
        for seed in range(2):
            chosen = first_of_each(class_orders(np.array(labels), seed=seed), shots)
            scores = direct_scores(
                *(values[0][chosen].astype(np.float64), np.array(labels)[chosen]),
                values[1].astype(np.float64),
                num_classes=4,
                l2=1024.0,
            )
            shares.append(np.mean(scores.argmax(axis=1) == labels))
        assert found[f"few_shot{shots}_top1"] == pytest.approx(np.mean(shares), abs=1e-12)
        assert found[f"few_shot{shots}_std"] == pytest.approx(np.std(shares, ddof=1), abs=1e-12)
    assert 0.3 < found["few_shot1_top1"] < found["few_shot3_top1"] < 1
    # Only what was drawn was extracted of the training set, and all of the other.
    assert len(subject.extracted[0]) < 25 and len(subject.extracted[1]) == 60
