"""Mixup and CutMix: the same on every layout, distributed as drawn, weighted accordingly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vitscale.data.loader import Batch
from vitscale.data.settings import MixingSettings
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.objectives.mixing import (
    cutmix_box,
    draw_blend,
    mix_batch,
    symmetric_beta,
)

SIZE, CLASSES = 6, 5
BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
MODES = [
    MixingSettings(**alphas, mode=mode)
    for mode in ("batch", "pair")
    for alphas in ({"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}, BOTH)
]


def samples(num: int, *, key: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(key)
    images = torch.randint(
        0, 256, (num, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8
    )
    labels = torch.randint(0, CLASSES, (num,), generator=generator)
    return Batch(images, labels, torch.ones(num))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [2, 4, 8])
def test_mixed_images_equal_float64_in_every_layout(
    mode: MixingSettings, micro_batch: int
) -> None:
    """Micro-batches of any rank, by the positions of their images in training."""
    for step in range(12):
        batch = samples(8, key=step)
        own = batch.images.numpy().astype(np.float64)
        parts = []
        for first in range(0, 8, micro_batch):
            rows = slice(first, first + micro_batch)
            part = Batch(batch.images[rows], batch.labels[rows], batch.weights[rows])
            parts.append(
                mix_batch(
                    part, mode, seed=0, step=step, first_position=8 * step + first
                )
            )
        for row in range(8):
            mixed, place = parts[row // micro_batch], row % micro_batch
            pair = 4 * step + row // 2
            key = stream_key("mix pair", 0, pair)
            if mode.mode == "batch":
                key = stream_key("mix", 0, step)
            blend = draw_blend(mode, key, image_size=SIZE)
            partner = own[row ^ 1]
            expected = blend.share * own[row] + (1 - blend.share) * partner
            if blend.box is not None:
                top, left, bottom, right = blend.box
                expected = own[row].copy()
                expected[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
                changed = (bottom - top) * (right - left) / SIZE**2
                assert blend.share == pytest.approx(1 - changed)
            np.testing.assert_allclose(
                mixed.images[place].numpy(), expected, atol=5e-5, rtol=0
            )
            assert mixed.mix_lambda[place].item() == pytest.approx(blend.share)
            assert mixed.mixed_labels[place] == batch.labels[row ^ 1]


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 0.8, 1.0, 1.5, 4.0, 30.0])
def test_beta_is_beta(alpha: float) -> None:
    random = CounterRandom(stream_key("test", alpha))
    drawn = np.array([symmetric_beta(alpha, random) for _ in range(20_000)])
    assert 0 <= min(drawn) and max(drawn) <= 1
    beta = stats.beta(alpha, alpha)
    low = drawn[drawn < 0.5]
    assert stats.kstest(low, lambda x: 2 * beta.cdf(x)).pvalue > 1e-3
    assert abs(len(low) / len(drawn) - 0.5) < 0.015
    if alpha >= 0.2:  # below, a part of the numbers near 1 is 1 in floating point
        assert stats.kstest(drawn, beta.cdf).pvalue > 1e-3


def test_cutmix_boxes() -> None:
    """Boxes inside the image have the drawn area; others are clipped, and the share is adjusted."""
    for key in range(500):
        random = CounterRandom(stream_key(key))
        wanted = random.uniform()
        blend = cutmix_box(wanted, random, image_size=224)
        assert blend.box is not None
        top, left, bottom, right = blend.box
        assert 0 <= top <= bottom <= 224 and 0 <= left <= right <= 224
        assert blend.share == 1 - (bottom - top) * (right - left) / 224**2
        side = int(224 * np.sqrt(1 - wanted))
        assert bottom - top <= side and right - left <= side
        if 0 < top and bottom < 224 and 0 < left and right < 224:
            assert (bottom - top, right - left) == (side, side)
            assert blend.share == pytest.approx(wanted, abs=2 / 224)
    assert cutmix_box(1.0, CounterRandom(0), image_size=8).share == 1.0
