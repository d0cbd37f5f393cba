"""Few-shot classification: ridge regression on the features of a few images per class.

Source: Dosovitskiy et al. 2021, sec. 4.1; big_vision, `evaluators/fewshot_lsr.py`. Shapes: N
images, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from vitscale.evaluation.evaluation import Output, Probe, SettingsBase, Share, Subject

if TYPE_CHECKING:
    import torch

# Appended to the features: a bias that the penalty hardly touches.
CONSTANT = 100.0


class FewShotSettings(SettingsBase):
    name: Literal["few_shot"] = "few_shot"
    """Metrics of every K in `shots`: val/few_shotK_top1, the mean over draws, and
    val/few_shotK_std, their standard deviation."""
    shots: tuple[PositiveInt, ...] = Field(
        default=(1, 5, 10, 25), min_length=1, strict=False
    )
    """Training images per class. Those of a draw are nested; a class with fewer gives all it
    has."""
    num_draws: PositiveInt = 3
    """Draws of training images, seeded 0, 1, 2, ..."""
    l2: PositiveFloat = 2.0**10
    """Penalty on the squared weights of standardised features."""


class FewShot(Probe):
    """Every rank solves the same small systems and scores its own validation images.

    Of a model with a representation layer (dense, tanh) after it, as in the paper.
    """

    Settings = FewShotSettings

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks

        settings = self.settings
        world = subject.model.world
        device = world.device
        output: Output = "features"
        if "representation" in subject.model.known_outputs:
            output = "representation"

        # The features of all draws are computed at once: the draws share many images.
        labels = np.concatenate([part.label for part in subject.train])
        draws = [class_orders(labels, seed=seed) for seed in range(settings.num_draws)]
        most = [first_of_each(orders, max(settings.shots)) for orders in draws]
        drawn = np.unique(np.concatenate(most))
        train = subject.features("train", output=output, samples=drawn).gathered()
        val = subject.features("val", output=output)

        correct = torch.zeros(
            len(settings.shots), len(draws), dtype=torch.float64, device=device
        )
        for row, count in enumerate(settings.shots):
            for draw, orders in enumerate(draws):
                samples = first_of_each(orders, count)
                few = train.rows(np.searchsorted(train.samples, samples))
                # The system is solved in fp64: few images make it badly conditioned.
                scores = fit_ridge(
                    few.values_ND.to(device),
                    few.labels_N.to(device),
                    num_classes=len(subject.val.classes),
                    l2=settings.l2,
                )
                correct[row, draw] = val.num_correct(scores, world=world)

        # A single draw is one share of images, which has an interval; several have a deviation.
        metrics: dict[str, float] = {}
        num_images = subject.val.num_samples
        counts = sum_over_ranks(correct).cpu().numpy()
        for shots, right in zip(settings.shots, counts, strict=True):
            name = f"few_shot{shots}"
            if len(draws) == 1:
                metrics[f"{name}_top1"] = Share(float(right[0]), num_images)
            else:
                metrics[f"{name}_top1"] = float((right / num_images).mean())
                metrics[f"{name}_std"] = float((right / num_images).std(ddof=1))
        return metrics


def class_orders(labels_N: np.ndarray, *, seed: int) -> list[np.ndarray]:
    """The samples of each class that has any, in an order drawn with `seed`.

    One generator for all classes, one permutation each, in the order of labels, as in big_vision.
    """
    # The first K of an order are the images of K shots, so that more shots contain the fewer.
    random = np.random.default_rng(seed)
    by_class = np.argsort(labels_N, kind="stable")
    ends = np.searchsorted(labels_N[by_class], np.unique(labels_N), side="right")
    return [random.permutation(group) for group in np.split(by_class, ends[:-1])]


def first_of_each(orders: list[np.ndarray], count: int) -> np.ndarray:
    """The first `count` samples of each class, or all of a smaller one."""
    return np.concatenate([order[:count] for order in orders])


def fit_ridge(
    features_ND: torch.Tensor, labels_N: torch.Tensor, *, num_classes: int, l2: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from features [N, D] to scores of classes, float64 [N, 1, C].

    Minimises the squared error to targets of 1 and -1 + l2 * squared weights, the constant's too.
    Features are standardised with the mean and deviation (+ 1e-5) of these.
    """
    import torch

    std_D, mean_D = torch.std_mean(features_ND.double(), dim=0, correction=0)

    def standardized(values_ND: torch.Tensor) -> torch.Tensor:
        scaled_ND = (values_ND.double() - mean_D) / (std_D + 1e-5)
        return torch.nn.functional.pad(scaled_ND, (0, 1), value=CONSTANT)

    # The normal equations: their size is the width, however many images there are.
    x_ND = standardized(features_ND)
    gram_DD = x_ND.T @ x_ND
    gram_DD.diagonal().add_(l2)

    # X^T (2 * one_hot - 1), without the one_hot.
    right_DC = x_ND.new_zeros(x_ND.shape[1], num_classes)
    right_DC.index_add_(1, labels_N, x_ND.T, alpha=2.0).sub_(x_ND.sum(dim=0)[:, None])
    weights_DC = torch.linalg.solve(gram_DD, right_DC)
    return lambda values_ND: (standardized(values_ND) @ weights_DC)[:, None]
