"""Mixup and CutMix of a micro-batch, on its device.

Partners are the positions 2i and 2i + 1 of training, which are in one micro-batch on every layout
if its size is even. Random numbers depend on the seed and the step (or pair) alone. So the mixed
images are the same for any number of ranks and accumulated micro-batches.
Leaves out: the losses of mixed labels (`losses`). B: batch, P: pairs, B = 2 P; S: image size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from vitscale.data.loader import Batch
from vitscale.data.settings import MixingSettings
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.objectives.draws import on_device


@dataclass(frozen=True, slots=True)
class Blend:
    """How the two images of a pair are mixed; each keeps `share` of its pixels or values."""

    share: float
    box: tuple[int, int, int, int] | None = None
    """(top, left, bottom, right) of the box taken from the partner; None: Mixup of all pixels."""


def mix_batch(
    batch: Batch, settings: MixingSettings, *, seed: int, step: int, first_position: int
) -> Batch:
    """Mix images (float32, 0..255) and set `mixed_labels` and `mix_lambda`.

    first_position: position in training of the batch's first sample; even.
    """
    num, _, _, side = batch.images.shape
    assert num % 2 == 0 and first_position % 2 == 0, (
        "the training plan must refuse this"
    )

    # Keys depend on the position in training alone, not on which rank has the batch.
    if settings.mode == "batch":
        keys = [stream_key("mix", seed, step)]
    else:
        first = first_position // 2
        pairs = range(first, first + num // 2)
        keys = [stream_key("mix pair", seed, pair) for pair in pairs]

    blends = [draw_blend(settings, key, image_size=side) for key in keys]
    shares = [blend.share for blend in blends] * (num // 2 // len(blends))
    return replace(
        batch,
        images=mix_images(batch.images, blends),
        mixed_labels=batch.labels.view(-1, 2).flip(1).flatten(),
        mix_lambda=on_device(shares, batch.images.device).repeat_interleave(2),
    )


def draw_blend(settings: MixingSettings, key: int, *, image_size: int) -> Blend:
    """Mixup or CutMix, and how much: a function of `key`."""
    random = CounterRandom(key)
    mixup = settings.mixup_alpha
    cutmix = settings.cutmix_alpha

    # Drawn in any case, so that the draws after it do not depend on the settings.
    switched = random.uniform() < 0.5
    if mixup is not None and (cutmix is None or not switched):
        share = symmetric_beta(mixup, random)
        # The larger share, as in AugReg. Each image of a pair is the main one once, so the smaller
        # share would give the same two images.
        return Blend(max(share, 1 - share))
    assert cutmix is not None
    return cutmix_box(symmetric_beta(cutmix, random), random, image_size=image_size)


def cutmix_box(share: float, random: CounterRandom, *, image_size: int) -> Blend:
    """A square box around a random pixel, clipped at the border; the share is its true area's.

    Source: Yun et al. 2019, eq. 2; rounding as in timm.
    """
    side = int(image_size * math.sqrt(1 - share))

    def span() -> tuple[int, int]:
        middle = int(random.uniform() * image_size)
        return max(middle - side // 2, 0), min(middle + (side + 1) // 2, image_size)

    top, bottom = span()
    left, right = span()

    # The box may have been cut off at the border, so its true area counts.
    area = (bottom - top) * (right - left)
    return Blend(1 - area / image_size**2, (top, left, bottom, right))


def mix_images(images_B3SS: torch.Tensor, blends: list[Blend]) -> torch.Tensor:
    """Mix each image with its partner; float32, not rounded. blends: one per pair, or for all."""
    device = images_B3SS.device
    rows, columns = images_B3SS.shape[-2:]
    keep_P = on_device([1.0 if blend.box else blend.share for blend in blends], device)
    keep_P11SS = keep_P.view(-1, 1, 1, 1, 1)
    if any(blend.box for blend in blends):
        # Made on the device: copying a mask per pair would be slow.
        boxes_P4 = on_device([blend.box or (0, 0, 0, 0) for blend in blends], device)
        top, left, bottom, right = boxes_P4[:, :, None].unbind(1)
        row_R = torch.arange(rows, device=device)
        column_C = torch.arange(columns, device=device)
        rows_PR = (row_R >= top) & (row_R < bottom)
        columns_PC = (column_C >= left) & (column_C < right)
        cut_PSS = rows_PR[:, :, None] & columns_PC[:, None, :]
        keep_P11SS = keep_P11SS * ~cut_PSS[:, None, None]

    # The two images of a pair are neighbours in the batch.
    own_P23SS = images_B3SS.float().unflatten(0, (-1, 2))
    # Exact at weights 0 and 1, so CutMix copies pixels unchanged.
    return torch.lerp(own_P23SS.flip(1), own_P23SS, keep_P11SS).flatten(0, 1)


def symmetric_beta(alpha: float, random: CounterRandom) -> float:
    """An exact draw from Beta(alpha, alpha).

    alpha < 1: Joehnk 1964, in logarithms, because powers of 1 / alpha underflow. alpha >= 1:
    Ulrich 1984. Source of both: Devroye 1986, ch. IX.3 and IX.4.
    """
    if alpha >= 1:
        u, v = random.uniform(), random.uniform()
        radius = math.sqrt(1 - u ** (2 / (2 * alpha - 1)))
        return (1 + radius * math.cos(2 * math.pi * v)) / 2
    while True:
        x = math.log(1 - random.uniform()) / alpha
        y = math.log(1 - random.uniform()) / alpha
        if math.exp(x) + math.exp(y) <= 1:
            # exp(x) / (exp(x) + exp(y)), written so that neither overflows.
            odds = math.exp(-abs(x - y))
            return 1 / (1 + odds) if x >= y else odds / (1 + odds)
