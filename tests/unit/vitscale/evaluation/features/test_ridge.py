"""Closed-form ridge classifiers equal a direct solve."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitscale.evaluation.features.ridge import fit_ridge


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


@pytest.mark.parametrize("num_images", [7, 24, 25, 26, 300])
def test_ridge_equals_a_direct_solve(num_images: int) -> None:
    random = np.random.default_rng(0)
    train = random.normal(3, 5, (num_images, 24)).astype(np.float32)
    test = random.normal(3, 5, (9, 24)).astype(np.float32)
    labels = random.integers(0, 4, num_images)
    fitted = fit_ridge(torch.from_numpy(train), torch.from_numpy(labels), num_classes=5, l2=2.0**10)
    expected = direct_scores(
        train.astype(np.float64), labels, test.astype(np.float64), num_classes=5, l2=2.0**10
    )
    found = fitted.scores(torch.from_numpy(test)).numpy()
    assert np.abs(found - expected).max() < 1e-6
