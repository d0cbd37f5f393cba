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

SIZE = 6
CLASSES = 5
# Mixup, CutMix, and either of the two by a draw.
ALPHAS = (
    {"mixup_alpha": 0.8},
    {"cutmix_alpha": 1.0},
    {"mixup_alpha": 0.8, "cutmix_alpha": 1.0},
)
MODES = [
    MixingSettings(**alphas, mode=mode)
    for mode in ("batch", "pair")
    for alphas in ALPHAS
]


def samples(num, *, key=0):
    generator = torch.Generator().manual_seed(key)
    images = torch.randint(
        0,
        256,
        (num, 3, SIZE, SIZE),
        generator=generator,
        dtype=torch.uint8,
    )
    labels = torch.randint(0, CLASSES, (num,), generator=generator)
    return Batch(images, labels, torch.ones(num))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [2, 4, 8])
def test_mixed_images_equal_float64_in_every_layout(mode, micro_batch):
    """Micro-batches of any rank, by the positions of their images in training."""
    for step in range(12):
        batch = samples(8, key=step)
        exact = batch.images.numpy().astype(np.float64)
        parts = []
        for first in range(0, 8, micro_batch):
            rows = slice(first, first + micro_batch)
            part = Batch(batch.images[rows], batch.labels[rows], batch.weights[rows])
            mixed = mix_batch(
                part,
                mode,
                seed=0,
                step=step,
                first_position=8 * step + first,
            )
            parts.append(mixed)

        # All micro-batches together are the images of the step, in order.
        images = torch.cat([part.images for part in parts]).numpy()
        shares = torch.cat([part.mix_lambda for part in parts]).tolist()
        labels = torch.cat([part.mixed_labels for part in parts])
        for row in range(8):
            # One draw for the step, or one for each pair, whose number counts through the run.
            key = stream_key("mix pair", 0, 4 * step + row // 2)
            if mode.mode == "batch":
                key = stream_key("mix", 0, step)
            blend = draw_blend(mode, key, image_size=SIZE)

            # Neighbours are partners: 0 and 1, 2 and 3, ...
            partner = exact[row ^ 1]
            expected = blend.share * exact[row] + (1 - blend.share) * partner
            if blend.box is not None:
                top, left, bottom, right = blend.box
                expected = exact[row].copy()
                expected[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
                changed = (bottom - top) * (right - left) / SIZE**2
                assert blend.share == pytest.approx(1 - changed)
            np.testing.assert_allclose(images[row], expected, atol=5e-5, rtol=0)
            assert shares[row] == pytest.approx(blend.share)
            assert labels[row] == batch.labels[row ^ 1]


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 0.8, 1.0, 1.5, 4.0, 30.0])
def test_beta_is_beta(alpha):
    random = CounterRandom(stream_key("test", alpha))
    drawn = np.array([symmetric_beta(alpha, random) for _ in range(20_000)])
    assert min(drawn) >= 0
    assert max(drawn) <= 1

    # The half below 0.5, whose numbers are exact, and then all.
    beta = stats.beta(alpha, alpha)
    low = drawn[drawn < 0.5]
    assert stats.kstest(low, lambda x: 2 * beta.cdf(x)).pvalue > 1e-3
    assert abs(len(low) / len(drawn) - 0.5) < 0.015
    if alpha >= 0.2:  # below, a part of the numbers near 1 is 1 in floating point
        assert stats.kstest(drawn, beta.cdf).pvalue > 1e-3


def test_cutmix_boxes():
    """Boxes inside the image have the drawn area; others are clipped, and the share is adjusted."""
    for key in range(500):
        random = CounterRandom(stream_key(key))
        wanted = random.uniform()
        blend = cutmix_box(wanted, random, image_size=224)
        assert blend.box is not None
        top, left, bottom, right = blend.box
        assert 0 <= top <= bottom <= 224
        assert 0 <= left <= right <= 224

        # Labels are mixed by the pixels that were replaced, not by those that were drawn.
        height = bottom - top
        width = right - left
        assert blend.share == 1 - height * width / 224**2
        side = int(224 * np.sqrt(1 - wanted))
        assert max(height, width) <= side
        if top > 0 and bottom < 224 and left > 0 and right < 224:
            assert height == side
            assert width == side
            assert blend.share == pytest.approx(wanted, abs=2 / 224)

    # A box of no pixels.
    assert cutmix_box(1.0, CounterRandom(0), image_size=8).share == 1.0
