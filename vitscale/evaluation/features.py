"""Features of a split's images, sharded over ranks. Needs no torch when imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# Images that linear classifiers score at once.
CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Features:
    """This rank's rows; over all ranks every sample is there once. N may be 0."""

    samples: np.ndarray
    """int64 [N]: numbers in the split, counted over all parts of a training set."""
    values_ND: torch.Tensor
    """fp32, on the CPU."""
    labels_N: torch.Tensor
    """int64, on the CPU."""

    @staticmethod
    def joined(parts: Sequence[Features]) -> Features:
        import torch

        return Features(
            samples=np.concatenate([part.samples for part in parts]),
            values_ND=torch.cat([part.values_ND for part in parts]),
            labels_N=torch.cat([part.labels_N for part in parts]),
        )

    def rows(self, chosen: np.ndarray) -> Features:
        """The rows that `chosen`, bool [N] or numbers, takes."""
        import torch

        rows = torch.from_numpy(chosen)
        return Features(
            samples=self.samples[chosen],
            values_ND=self.values_ND[rows],
            labels_N=self.labels_N[rows],
        )

    def gathered(self) -> Features:
        """The rows of all ranks, ordered by sample. Collective."""
        from vitscale.distributed.world import gather_objects

        whole = Features.joined(gather_objects(self))
        return whole.rows(np.argsort(whole.samples))

    def num_correct(
        self,
        scores: Callable[[torch.Tensor], torch.Tensor],
        *,
        device: torch.device,
        size: int = CHUNK,
    ) -> torch.Tensor:
        """Count this rank's rows that each of H classifiers predicts right: int64 [H].

        scores: at most `size` values [B, D] on `device` -> [B, H, classes].
        """
        import torch

        correct = []
        for values_BD, labels_B in zip(
            self.values_ND.split(size), self.labels_N.split(size), strict=True
        ):
            guesses_BH = scores(values_BD.to(device)).argmax(dim=2)
            correct.append((guesses_BH == labels_B.to(device)[:, None]).sum(dim=0))
        return torch.stack(correct).sum(dim=0)
