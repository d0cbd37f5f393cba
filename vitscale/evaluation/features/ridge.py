"""Closed-form linear classifiers: ridge regression to targets of plus and minus one.

As big_vision's `evaluators/fewshot_lsr.py`, in float64. Shapes: N images, D width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Appended to the features: a bias that the penalty hardly touches.
CONSTANT = 100.0
STD_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class RidgeClassifier:
    mean_D: torch.Tensor
    std_D: torch.Tensor
    weights_DC: torch.Tensor
    """[D + 1, C]; the last row is of the constant."""

    def scores(self, features_ND: torch.Tensor) -> torch.Tensor:
        """float64 [N, C]"""
        return _standardized(features_ND, self.mean_D, self.std_D) @ self.weights_DC


def fit_ridge(
    features_ND: torch.Tensor, labels_N: torch.Tensor, *, num_classes: int, l2: float
) -> RidgeClassifier:
    """Minimise the squared error to the targets + l2 * squared weights, the constant's included.

    Features are standardised with their own mean and deviation (+ 1e-5). Solved through the
    eigenvectors of the smaller of the two Gram matrices.
    """
    features_ND = features_ND.double()
    std_D, mean_D = torch.std_mean(features_ND, dim=0, correction=0)
    std_D = std_D + STD_EPS
    x_ND = _standardized(features_ND, mean_D, std_D)
    if len(x_ND) >= x_ND.shape[1]:
        values, vectors = torch.linalg.eigh(x_ND.T @ x_ND)
        # X^T (2 * one_hot - 1), without the one_hot.
        right_DC = torch.zeros(x_ND.shape[1], num_classes, dtype=x_ND.dtype, device=x_ND.device)
        right_DC.index_add_(1, labels_N, x_ND.T, alpha=2.0)
        right_DC -= x_ND.sum(dim=0)[:, None]
        left = vectors
    else:
        values, vectors = torch.linalg.eigh(x_ND @ x_ND.T)
        right_DC = 2.0 * torch.nn.functional.one_hot(labels_N, num_classes).double() - 1.0
        left = x_ND.T @ vectors
    weights_DC = left @ ((vectors.T @ right_DC) / (values + l2)[:, None])
    return RidgeClassifier(mean_D=mean_D, std_D=std_D, weights_DC=weights_DC)


def _standardized(
    features_ND: torch.Tensor, mean_D: torch.Tensor, std_D: torch.Tensor
) -> torch.Tensor:
    scaled_ND = (features_ND.double() - mean_D) / std_D
    return torch.nn.functional.pad(scaled_ND, (0, 1), value=CONSTANT)
