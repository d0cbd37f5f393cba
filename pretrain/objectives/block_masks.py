"""Blocks of patches that iBOT masks, a function of the position in training. Needs no torch.

Source: Bao et al. 2022 (BEiT), algorithm 1, with the shares of DINOv2.
"""

from __future__ import annotations

import math

import numpy as np

from vitscale.distributed.random_numbers import CounterRandom, stream_key

LEAST_BLOCK = 4
ASPECT = (0.3, 1 / 0.3)
TRIES = 10


def draw_masks(
    positions_B: np.ndarray,
    *,
    num_views: int,
    grid: tuple[int, int],
    masked_views: float,
    shares: tuple[float, float],
    seed: int,
) -> np.ndarray:
    """Which patches of each global view are masked, bool [B * num_views, L].

    masked_views: share of the views that are masked at all, exact over a global batch. shares:
    least and largest share of the patches of a masked view. A mask depends on the position of its
    image and the number of the view alone.
    """
    masks = np.zeros((len(positions_B), num_views, *grid), dtype=bool)
    for image, position in enumerate(positions_B):
        random = CounterRandom(stream_key("block masks", seed, int(position)))
        # Views are counted on from image to image, and each image begins with another view.
        first_view = int(random.uniform() * num_views)
        for number in range(num_views):
            count = int(position) * num_views + number
            if math.floor((count + 1) * masked_views) > math.floor(
                count * masked_views
            ):
                view = (first_view + number) % num_views
                share = random.uniform(*shares)
                _mask_blocks(masks[image, view], share, random)
    return masks.reshape(len(positions_B) * num_views, -1)


def _mask_blocks(mask_RC: np.ndarray, share: float, random: CounterRandom) -> None:
    """Mask about this share of the patches, at least one and never more, in rectangles."""
    rows, columns = mask_RC.shape
    wanted = max(1, round(share * mask_RC.size))
    failed = 0
    while failed < TRIES:
        rest = wanted - int(mask_RC.sum())
        if rest == 0:
            return
        area = random.uniform(min(LEAST_BLOCK, rest), rest)
        # Drawn in the logarithm, so that a block is as often wide as it is high.
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        height = min(max(1, round(math.sqrt(area * aspect))), rows, rest)
        width = min(max(1, round(math.sqrt(area / aspect))), columns, rest // height)
        top = int(random.uniform() * (rows - height + 1))
        left = int(random.uniform() * (columns - width + 1))
        block_RC = mask_RC[top : top + height, left : left + width]

        # A block that would mask no new one is drawn again.
        if block_RC.all():
            failed += 1
        else:
            block_RC[:] = True
            failed = 0
