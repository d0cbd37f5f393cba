"""Mixup and CutMix: the same on every layout, distributed as drawn, weighted accordingly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vitscale.data.loader import Batch, cutmix_box, draw_blend, mix_batch, symmetric_beta
from vitscale.data.order import rank_batches
from vitscale.data.settings import MixingSettings
from vitscale.distributed.random_numbers import CounterRandom, stream_key

GLOBAL_BATCH, SIZE, CLASSES = 24, 6, 5
BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
MODES = [
    MixingSettings(**alphas, mode=mode)
    for mode in ("batch", "pair")
    for alphas in ({"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}, BOTH)
]


def samples(num: int, *, key: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(key)
    images = torch.randint(0, 256, (num, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (num,), generator=generator)
    return Batch(images, labels, torch.ones(num))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("micro_batch", "world_size"), [(2, 1), (6, 1), (12, 1), (2, 4), (4, 2), (6, 4)]
)
def test_every_layout_mixes_the_same(
    mode: MixingSettings, micro_batch: int, world_size: int
) -> None:
    """Ranks x accumulation: rows of the global batch are compared bit by bit."""
    whole, start = samples(GLOBAL_BATCH), 7 * GLOBAL_BATCH
    layout = {"world_size": world_size, "micro_batch": micro_batch}
    expected = mix_batch(whole, mode, seed=3, step=7, first_position=start)
    assert expected.mixed_labels is not None and expected.mix_lambda is not None
    seen = []
    for rank in range(world_size):
        for positions in rank_batches(start=start, stop=start + GLOBAL_BATCH, rank=rank, **layout):
            rows = [position - start for position in positions]
            part = Batch(whole.images[rows], whole.labels[rows], whole.weights[rows])
            mixed = mix_batch(part, mode, seed=3, step=7, first_position=positions[0])
            for name in ("images", "labels", "mixed_labels", "mix_lambda"):
                assert torch.equal(getattr(mixed, name), getattr(expected, name)[rows])
            seen += rows
    assert sorted(seen) == list(range(GLOBAL_BATCH))


@pytest.mark.parametrize("mode", MODES)
def test_mixed_images_equal_float64(mode: MixingSettings) -> None:
    for step in range(12):
        batch = samples(8, key=step)
        mixed = mix_batch(batch, mode, seed=0, step=step, first_position=8 * step)
        own = batch.images.numpy().astype(np.float64)
        for row in range(8):
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
            np.testing.assert_allclose(mixed.images[row].numpy(), expected, atol=5e-5, rtol=0)
            assert mixed.mix_lambda[row].item() == pytest.approx(blend.share)
            assert mixed.mixed_labels[row] == batch.labels[row ^ 1]


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
