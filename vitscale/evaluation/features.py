"""Features of a split's images, sharded over ranks. Needs no torch when imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from vitscale.distributed.world import World

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
        import torch
        import torch.nn.functional as F

        from vitscale.distributed.world import gather_objects, gather_rows

        parts = gather_objects((self.samples, self.labels_N.numpy()))
        most = max(len(samples) for samples, _ in parts)
        padded_RD = gather_rows(F.pad(self.values_ND, (0, 0, 0, most - len(self.samples))))
        rows = [rank * most + np.arange(len(samples)) for rank, (samples, _) in enumerate(parts)]
        whole = Features(
            samples=np.concatenate([samples for samples, _ in parts]),
            values_ND=padded_RD[torch.from_numpy(np.concatenate(rows))],
            labels_N=torch.from_numpy(np.concatenate([labels for _, labels in parts])),
        )
        return whole.rows(np.argsort(whole.samples))

    def batches(
        self, world: World, *, size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Values [B, D], labels [B] and weights [B] (0 for padding) on the rank's device.

        Equally many of equal size on every rank, for loops with collectives. Collective.
        """
        import torch
        import torch.nn.functional as F

        from vitscale.distributed.world import gather_objects

        most = max(gather_objects(len(self.samples)))
        size = min(size, most)
        for first in range(0, most, size):
            values_BD = self.values_ND[first : first + size].to(world.device)
            labels_B = self.labels_N[first : first + size].to(world.device)
            missing = size - len(labels_B)
            weights_B = F.pad(torch.ones(len(labels_B), device=world.device), (0, missing))
            yield F.pad(values_BD, (0, 0, 0, missing)), F.pad(labels_B, (0, missing)), weights_B

    def num_correct(
        self, scores: Callable[[torch.Tensor], torch.Tensor], *, device: torch.device
    ) -> torch.Tensor:
        """Count this rank's rows that each of H classifiers predicts right: int64 [H].

        scores: values [B, D] on `device` -> [B, H, classes].
        """
        import torch

        correct = []
        for values_BD, labels_B in zip(
            self.values_ND.split(CHUNK), self.labels_N.split(CHUNK), strict=True
        ):
            guesses_BH = scores(values_BD.to(device)).argmax(dim=2)
            correct.append((guesses_BH == labels_B.to(device)[:, None]).sum(dim=0))
        return torch.stack(correct).sum(dim=0)
