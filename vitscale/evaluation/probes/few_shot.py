"""Few-shot classification: ridge regression on the features of a few images per class.

Source: Dosovitskiy et al. 2021, sec. 4.1; big_vision, `evaluators/fewshot_lsr.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from vitscale.evaluation.interface.evaluation import (
    Evaluation,
    EvaluationSettingsBase,
    Share,
    Subject,
)

if TYPE_CHECKING:
    import torch

# Images scored at once, in float64.
CHUNK = 4096


class FewShotSettings(EvaluationSettingsBase):
    name: Literal["few_shot"] = "few_shot"
    """Metrics of every K in `shots`: val/few_shotK_top1, the mean over draws, and
    val/few_shotK_std, their standard deviation."""
    shots: tuple[int, ...] = Field(default=(1, 5, 10, 25), min_length=1, strict=False)
    """Training images per class. Those of a draw are nested; a class with fewer gives all it
    has."""
    num_draws: int = Field(default=3, gt=0)
    """Draws of training images, seeded 0, 1, 2, ..."""
    l2: float = Field(default=2.0**10, gt=0)
    """Penalty on the squared weights of standardised features."""
    representation: Literal["features", "pre_logits"] = "pre_logits"
    """pre_logits: after the representation layer (dense, tanh) of a model that has one, as in the
    paper. features: before it. The same for other models."""

    def metric_names(self) -> tuple[str, ...]:
        return tuple(f"few_shot{k}_{kind}" for k in self.shots for kind in ("top1", "std"))


class FewShot(Evaluation):
    """Every rank solves the same small systems and scores its own validation images."""

    Settings = FewShotSettings
    needs = "features"

    def metrics(self, subject: Subject) -> dict[str, float]:
        import torch

        from vitscale.distributed.world import sum_over_ranks

        device, shots = subject.model.world.device, self.settings.shots
        kind = self.settings.representation
        output: Literal["features", "representation"] = (
            "representation" if kind == "pre_logits" else "features"
        )
        labels = np.concatenate([part.label for part in subject.train])
        draws = [class_orders(labels, seed=seed) for seed in range(self.settings.num_draws)]
        most = [first_of_each(orders, max(shots)) for orders in draws]
        train = subject.train_features(
            output=output, samples=np.unique(np.concatenate(most))
        ).gathered()
        val = subject.val_features(output=output)
        correct = torch.zeros(len(draws), len(shots), dtype=torch.float64, device=device)
        for draw, orders in enumerate(draws):
            for column, count in enumerate(shots):
                chosen = np.searchsorted(train.samples, first_of_each(orders, count))
                correct[draw, column] = self._num_correct(
                    train.values_ND[torch.from_numpy(chosen)].to(device),
                    train.labels_N[torch.from_numpy(chosen)].to(device),
                    val.values_ND,
                    val.labels_N,
                    num_classes=len(subject.val.classes),
                )
        shares = (sum_over_ranks(correct) / subject.val.num_samples).cpu().numpy()
        found: dict[str, float] = {}
        for column, count in enumerate(shots):
            name, drawn = f"few_shot{count}", shares[:, column]
            if len(draws) == 1:
                images = subject.val.num_samples
                found[f"{name}_top1"] = Share(float(drawn[0]) * images, images)
            else:
                found[f"{name}_top1"] = float(drawn.mean())
                found[f"{name}_std"] = float(drawn.std(ddof=1))
        return found

    def _num_correct(
        self,
        train_ND: torch.Tensor,
        train_labels_N: torch.Tensor,
        val_ND: torch.Tensor,
        val_labels_N: torch.Tensor,
        *,
        num_classes: int,
    ) -> int:
        from vitscale.evaluation.features.ridge import fit_ridge

        classifier = fit_ridge(
            train_ND, train_labels_N, num_classes=num_classes, l2=self.settings.l2
        )
        correct = 0
        for values_BD, labels_B in zip(val_ND.split(CHUNK), val_labels_N.split(CHUNK), strict=True):
            guesses_B = classifier.scores(values_BD.to(train_ND.device)).argmax(dim=1)
            correct += int((guesses_B == labels_B.to(train_ND.device)).sum())
        return correct


def class_orders(labels_N: np.ndarray, *, seed: int) -> list[np.ndarray]:
    """The samples of each class that has any, in an order drawn with `seed`.

    One generator for all classes, one permutation each, in the order of labels, as in big_vision.
    """
    random = np.random.default_rng(seed)
    by_class = np.argsort(labels_N, kind="stable")
    ends = np.searchsorted(labels_N[by_class], np.unique(labels_N), side="right")
    return [random.permutation(group) for group in np.split(by_class, ends[:-1])]


def first_of_each(orders: list[np.ndarray], count: int) -> np.ndarray:
    """The first `count` samples of each class, or all of a smaller one."""
    return np.concatenate([order[:count] for order in orders])
