"""Extract features once and share them between evaluations.

Needs no torch when imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitscale.evaluation.features.rows import owners

if TYPE_CHECKING:
    import torch

    from vitscale.data.index import SplitIndex
    from vitscale.distributed.world import World

# Extracts samples in order: batches of this rank [B, D]; those of all ranks, one after the other,
# are the samples, with padding at the end. Collective.
Extract = Callable[[np.ndarray], Iterator["torch.Tensor"]]


class _Held(NamedTuple):
    samples: np.ndarray
    """int64, increasing."""
    values: torch.Tensor


class FeatureStore:
    """Features in memory, each rank its share.

    Keyed by split and output, not by weights: forget them before the weights change.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], _Held] = {}

    def forget(self) -> None:
        """Free the memory."""
        self._held.clear()

    def rows(
        self,
        index: SplitIndex,
        samples: np.ndarray,
        *,
        output: str,
        world: World,
        extract: Extract,
    ) -> tuple[np.ndarray, torch.Tensor]:
        """This rank's share of `samples` (increasing), and their features [N, D]. Collective.

        Only samples that no rank holds are extracted.
        """
        import torch

        from vitscale.distributed.world import sum_over_ranks

        is_own = owners(samples, world_size=world.world_size) == world.rank
        own = samples[is_own]
        key = (index.fingerprint, output)
        is_held = np.isin(samples, self._samples(key))
        wanted = torch.from_numpy(is_own & ~is_held).to(world.device, torch.int32)
        missing = samples[sum_over_ranks(wanted).cpu().numpy() > 0]
        if len(missing):
            self._extract(key, missing, world=world, extract=extract)
        held = self._held[key]
        return own, held.values[np.searchsorted(held.samples, own)]

    def _extract(
        self, key: tuple[str, str], missing: np.ndarray, *, world: World, extract: Extract
    ) -> None:
        import torch

        from vitscale.distributed.world import gather_rows

        is_own = owners(missing, world_size=world.world_size) == world.rank
        kept, first = [], 0
        for values_BD in extract(missing):
            rows_RD = gather_rows(values_BD)[: len(missing) - first].cpu()
            chosen = slice(first, first + len(rows_RD))
            kept.append(rows_RD[torch.from_numpy(is_own[chosen])])
            first += len(rows_RD)
        assert first == len(missing), f"extracted {first} of {len(missing)} samples"
        self._hold(key, missing[is_own], torch.cat(kept))

    def _samples(self, key: tuple[str, str]) -> np.ndarray:
        return self._held[key].samples if key in self._held else np.empty(0, np.int64)

    def _hold(self, key: tuple[str, str], samples: np.ndarray, values: torch.Tensor) -> None:
        import torch

        if key in self._held:
            held = self._held[key]
            is_new = ~np.isin(samples, held.samples)
            samples = np.concatenate([held.samples, samples[is_new]])
            values = torch.cat([held.values, values[torch.from_numpy(is_new)]])
        order = np.argsort(samples)
        self._held[key] = _Held(samples[order], values[torch.from_numpy(order)])
