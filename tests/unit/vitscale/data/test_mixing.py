"""Mixup and CutMix: the same on every layout, distributed as drawn, weighted accordingly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.data.loader import Batch
from vitscale.data.mixing import (
    cutmix_box,
    draw_blend,
    mix_batch,
    symmetric_beta,
)
from vitscale.data.order import rank_batches
from vitscale.data.settings import MixingSettings
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.runs.training import training_plan
from vitscale.training.losses import LOSSES

GLOBAL_BATCH, SIZE, CLASSES = 24, 6, 5
MODES = {
    "mixup, batch": MixingSettings(mixup_alpha=0.8),
    "mixup, pair": MixingSettings(mixup_alpha=0.8, mode="pair"),
    "cutmix, batch": MixingSettings(cutmix_alpha=1.0),
    "both, batch": MixingSettings(mixup_alpha=0.8, cutmix_alpha=1.0),
    "both, pair": MixingSettings(mixup_alpha=0.8, cutmix_alpha=1.0, mode="pair"),
}


def samples(num: int, *, key: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(key)
    images = torch.randint(0, 256, (num, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (num,), generator=generator)
    return Batch(images, labels, torch.ones(num))


def part_of(batch: Batch, rows: list[int]) -> Batch:
    return Batch(batch.images[rows], batch.labels[rows], batch.weights[rows])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch", [2, 4, 6, 12])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_mixes_the_same(mode: str, micro_batch: int, world_size: int) -> None:
    """Ranks x accumulation: rows of the global batch are compared bit by bit."""
    step = 7
    if GLOBAL_BATCH % (micro_batch * world_size):
        return
    whole = samples(GLOBAL_BATCH)
    start = step * GLOBAL_BATCH
    expected = mix_batch(whole, MODES[mode], seed=3, step=step, first_position=start)
    assert expected.mixed_labels is not None and expected.mix_lambda is not None
    num_seen = 0
    for rank in range(world_size):
        for positions in rank_batches(
            start=start,
            stop=start + GLOBAL_BATCH,
            rank=rank,
            world_size=world_size,
            micro_batch=micro_batch,
        ):
            rows = [position - start for position in positions]
            mixed = mix_batch(
                part_of(whole, rows), MODES[mode], seed=3, step=step, first_position=positions[0]
            )
            assert torch.equal(mixed.images, expected.images[rows])
            assert torch.equal(mixed.labels, whole.labels[rows])
            assert torch.equal(mixed.mixed_labels, expected.mixed_labels[rows])
            assert torch.equal(mixed.mix_lambda, expected.mix_lambda[rows])
            num_seen += len(rows)
    assert num_seen == GLOBAL_BATCH


@pytest.mark.parametrize("mode", MODES)
def test_mixed_images_equal_float64(mode: str) -> None:
    for step in range(12):
        batch = samples(8, key=step)
        mixed = mix_batch(batch, MODES[mode], seed=0, step=step, first_position=8 * step)
        own = batch.images.numpy().astype(np.float64)
        for row in range(8):
            pair = 4 * step + row // 2
            key = stream_key("mix pair", 0, pair)
            if MODES[mode].mode == "batch":
                key = stream_key("mix", 0, step)
            blend = draw_blend(MODES[mode], key, image_size=SIZE)
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


def test_shares_over_steps_are_the_larger_of_beta() -> None:
    """Keys of neighbouring steps are independent: all draws are one sample."""
    options = MODES["mixup, batch"]
    shares = [
        draw_blend(options, stream_key("mix", 0, step), image_size=224).share
        for step in range(8000)
    ]
    beta = stats.beta(0.8, 0.8)
    assert stats.kstest(shares, lambda x: np.maximum(2 * beta.cdf(x) - 1, 0)).pvalue > 1e-3
    assert abs(np.corrcoef(shares[1:], shares[:-1])[0, 1]) < 0.04


def test_one_of_both_is_drawn_each_time() -> None:
    options = MixingSettings(mixup_alpha=0.8, cutmix_alpha=1.0)
    boxes = [draw_blend(options, stream_key(k), image_size=224).box for k in range(4000)]
    assert np.mean([box is not None for box in boxes]) == pytest.approx(0.5, abs=0.03)


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


def test_cutmix_boxes_are_square_unless_clipped() -> None:
    inside = 0
    for key in range(200):
        random = CounterRandom(stream_key(key))
        wanted = random.uniform()
        blend = cutmix_box(wanted, random, image_size=224)
        assert blend.box is not None
        top, left, bottom, right = blend.box
        assert 0 <= top <= bottom <= 224 and 0 <= left <= right <= 224
        assert blend.share == 1 - (bottom - top) * (right - left) / 224**2
        if 0 < top and bottom < 224 and 0 < left and right < 224:
            assert bottom - top == right - left == int(224 * np.sqrt(1 - wanted))
            inside += 1
    assert inside > 20


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, smoothing", [("softmax", 0.0), ("softmax", 0.1), ("sigmoid", 0.0)])
def test_loss_of_mixed_labels(name: str, smoothing: float) -> None:
    """The two losses weighted by hand in float64; and the loss of the mixed target itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, CLASSES, generator=generator) * 3
    batch = samples(8)
    mixed = mix_batch(batch, MODES["both, pair"], seed=0, step=0, first_position=0)
    loss = LOSSES[name](
        logits,
        batch.labels,
        smoothing,
        mixed_labels_B=mixed.mixed_labels,
        mix_lambda_B=mixed.mix_lambda,
    )
    shares = mixed.mix_lambda.double()
    rows = [
        share * LOSSES[name](logits[i : i + 1].double(), batch.labels[i : i + 1], smoothing)
        + (1 - share)
        * LOSSES[name](logits[i : i + 1].double(), mixed.mixed_labels[i : i + 1], smoothing)
        for i, share in enumerate(shares)
    ]
    assert loss.item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(torch.stack([batch.labels, mixed.mixed_labels]), CLASSES)
    target = shares[:, None] * one_hot[0] + (1 - shares[:, None]) * one_hot[1]
    if name == "softmax":
        target = (1 - smoothing) * target + smoothing / CLASSES
        direct = torch.nn.functional.cross_entropy(logits.double(), target)
    else:
        direct = torch.nn.functional.binary_cross_entropy_with_logits(
            logits.double(), target, reduction="sum"
        ) / len(logits)
    assert loss.item() == pytest.approx(direct.item(), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_share_one_is_the_plain_loss(name: str) -> None:
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1))
    labels, others = samples(6).labels, samples(6, key=1).labels
    plain = LOSSES[name](logits, labels, 0.0)
    mixed = LOSSES[name](
        logits, labels, 0.0, mixed_labels_B=others, mix_lambda_B=torch.ones(len(labels))
    )
    assert mixed.item() == pytest.approx(plain.item(), rel=1e-6)


# ---- the plan ------------------------------------------------------------------------------------


def a_run(*, global_batch: int, max_micro_batch: int, mixing: bool) -> PretrainRun:
    return PretrainRun.model_validate(
        {
            "stage": "pretrain",
            "name": "mixed",
            "data": {
                "path": "shards",
                "global_batch": global_batch,
                "mixing": {"mixup_alpha": 0.2} if mixing else None,
            },
            "model": {"preset": "vit_b16"},
            "optim": {"lr": 1e-3},
            "schedule": {"steps": 10},
            "engine": {"max_micro_batch": max_micro_batch},
        }
    )


def test_micro_batches_are_even_when_mixing() -> None:
    for mixing, expected in ((False, 9), (True, 6)):
        plan = training_plan(
            a_run(global_batch=36, max_micro_batch=9, mixing=mixing), world_size=2, num_samples=99
        )
        assert plan.micro_batch == expected
        assert plan.micro_batch * plan.accumulation * 2 == 36


@pytest.mark.parametrize("global_batch, max_micro_batch", [(6, 8), (8, 1)])
def test_odd_micro_batches_are_refused(global_batch: int, max_micro_batch: int) -> None:
    run = a_run(global_batch=global_batch, max_micro_batch=max_micro_batch, mixing=True)
    with pytest.raises(UserError, match="data.mixing.*no even micro-batch"):
        training_plan(run, world_size=2, num_samples=99)


def test_mixing_nothing_is_reported() -> None:
    run = a_run(global_batch=8, max_micro_batch=8, mixing=True)
    data = run.data.model_copy(update={"mixing": MixingSettings()})
    problems = run.model_copy(update={"data": data}).problems()
    assert "data.mixing" in [key for key, _ in problems]
