"""Quirks of the papers' code that would break a reproduction."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.steps.labels import load_space
from tests.unit.vitscale.optim.test_recipe_fidelity import PUBLISHED, recipe
from vitscale.data.loader import Batch
from vitscale.data.mixing import mix_batch
from vitscale.data.settings import DataSettings, MixingSettings
from vitscale.images.crops import center_crop
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.optim.schedules import learning_rate
from vitscale.runs.training import TrainingPlan, training_plan
from vitscale.training.losses import sigmoid_loss, softmax_loss


def small(**changes: Any) -> torch.nn.Module:
    settings = ViTSettings(
        image_size=8, patch_size=4, width=96, depth=2, num_heads=4, mlp_width=160
    ).model_copy(update=changes)
    return build_model(settings.resolved(num_classes=7), seed=0)


def test_a_fused_initialisation_would_be_too_narrow() -> None:
    weights = dict(small().named_parameters())
    fused = math.sqrt(6 / (96 + 3 * 96))
    assert fused / math.sqrt(6 / (96 + 96)) == pytest.approx(0.707, abs=1e-3)
    assert weights["blocks.0.attn.qkv.weight"].abs().max() > 1.35 * fused
    mlp = torch.cat([p for name, p in weights.items() if ".mlp." in name and "bias" in name])
    assert mlp.std().item() == pytest.approx(1e-6, rel=0.1)
    for name in ("cls_token", "head.weight", "head.bias", "blocks.0.attn.qkv.bias"):
        assert weights[name].abs().max() == 0, name


def test_the_loss_is_a_sum_over_classes() -> None:
    """21,843 ln 2 = 15,140 at zero; a mean would shrink gradients below any clip at 1."""
    labels = torch.tensor([3, 9])
    logits = torch.zeros(2, 21_843, requires_grad=True)
    loss = sigmoid_loss(logits, labels, 0.0)
    assert loss.item() == pytest.approx(15_140, abs=1)
    (summed,) = torch.autograd.grad(loss, logits)
    targets = torch.nn.functional.one_hot(labels, 21_843).float()
    mean = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    (averaged,) = torch.autograd.grad(mean, logits)
    assert (summed.norm() / averaged.norm()).item() == pytest.approx(21_843, rel=1e-4)
    assert summed.norm() > 1 > averaged.norm()


def test_merged_duplicates_shorten_90_epochs() -> None:
    run = recipe("vit_l16")
    merged = training_plan(run, world_size=32, num_samples=12_400_000)
    files = training_plan(run, world_size=32, num_samples=14_200_000)
    assert (round(merged.total_steps, -3), round(files.total_steps, -3)) == (272_000, 312_000)
    assert run.data.planned_num_samples == 12_400_000


def test_pixels_reach_from_minus_one_to_one() -> None:
    for name in PUBLISHED:
        data = recipe(name).data
        ends = [(x / 255 - data.mean[0]) / data.std[0] for x in (0, 255)]
        google = not name.startswith(("deit", "finetune/deit", "mae", "finetune/mae"))
        assert (ends == [-1.0, 1.0]) is google, name


@pytest.mark.parametrize("width, height", [(500, 375), (375, 500), (300, 300), (800, 256)])
def test_the_centre_is_224_of_256(width: int, height: int) -> None:
    """big_vision: short side to 256, then the centre 224 of both sides."""
    scale = min(width, height) / 256
    sides = [round(length / scale) for length in (height, width)]
    box, resized, starts = center_crop(width, height, size=224, fraction=0.875)
    assert resized == pytest.approx(sides, abs=1)
    assert starts == pytest.approx([(side - 224) / 2 for side in sides], abs=1)
    assert (box.width, box.height) == (width, height)


def test_pairs_mix_every_image_once() -> None:
    """The share of image j in image i: the same numbers in every row and column as rolling."""
    num = 8
    images = torch.zeros(num, 3, num, num)
    for i in range(num):
        images[i, :, i, :] = 1.0
    batch = Batch(images, torch.arange(num), torch.ones(num))
    settings = DataSettings(
        path="shards", global_batch=num, mixing=MixingSettings(mixup_alpha=0.2)
    ).mixing
    assert settings is not None and settings == recipe("augreg_i21k/b16").data.mixing
    for step in range(20):
        mixed = mix_batch(batch, settings, seed=0, step=step, first_position=step * num)
        shares = mixed.images[:, 0, :, 0].numpy()
        assert mixed.mix_lambda is not None
        largest = mixed.mix_lambda[0].item()
        rolled = largest * np.eye(num) + (1 - largest) * np.roll(np.eye(num), 1, axis=0)
        assert 0.5 <= largest <= 1.0
        for axis in (0, 1):
            assert np.allclose(np.sort(shares, axis), np.sort(rolled, axis), atol=1e-6)


def test_mean_pooling_is_never_a_default() -> None:
    """It needs a rate of its own: only the recipes that were tuned with it have it."""
    pooled = {name for name in PUBLISHED if getattr(recipe(name).model, "pool", None) == "gap"}
    assert {name.split()[0] for name in pooled} == {"plain_vit/s16_90ep", "finetune/mae_b16"}
    assert ViTSettings().pool == "cls"


def test_label_lists_differ() -> None:
    google, fall = load_space("imagenet_21k_goog"), load_space("imagenet_22k")
    assert (len(google), len(fall)) == (21_843, 21_841)
    assert len(load_space("imagenet_21k_p")) == 11_221
    assert len(load_space("imagenet_21k_p_winter21")) == 10_450
    assert recipe("vit_h14").model.num_classes == len(google)
    # A zero head on 21,843 classes: ln 21,843.
    loss = softmax_loss(torch.zeros(1, len(google)), torch.tensor([0]), 0.0)
    assert loss.item() == pytest.approx(9.99, abs=0.005)


def test_rates_are_never_scaled_by_the_batch() -> None:
    run = recipe("deit3_i21k/b16")
    plans = [
        training_plan(
            run.model_copy(update={"data": run.data.model_copy(update={"global_batch": batch})}),
            world_size=1,
            num_samples=10**6,
        )
        for batch in (256, 2048)
    ]
    for plan in plans:
        peak = max(
            learning_rate(
                step,
                peak=run.optim.lr,
                final=run.schedule.final_lr,
                warmup_steps=plan.warmup_steps,
                total_steps=plan.total_steps,
                decay=run.schedule.decay,
            )
            for step in range(plan.warmup_steps + 2)
        )
        assert peak == pytest.approx(1e-3, rel=1e-12)
    assert not [field.name for field in fields(TrainingPlan) if "lr" in field.name]
