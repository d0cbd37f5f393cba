"""Compare the pixels of our loader with Pillow's.

python benchmarks/loader/pixels.py SHARDS --decoder region
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.loader.contenders import AREA, ASPECT, sample_order
from benchmarks.loader.ours import BATCH, SEED, SIDE, data_settings, training_loader
from vitscale.data.index import read_split
from vitscale.data.order import Draw
from vitscale.data.samples import augmentation_key
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images import crops

# Stands for infinity, which JSON does not have.
IDENTICAL = 99.0


def run(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """PSNR in dB of each image against Pillow's pixels of the same box; labels of the index."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--decoder", default="region")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=SIDE)
    options = parser.parse_args(arguments)
    settings = data_settings(
        options.shards, workers=options.workers, decoder=options.decoder
    )
    index = read_split(options.shards, split="train")
    order = sample_order(options.shards)

    # Whole batches: the loader gives no part of one.
    num_batches = min(options.images, index.num_samples) // BATCH
    stop = num_batches * BATCH
    psnr: list[float] = []
    wrong_labels = 0
    position = 0
    loader = training_loader(settings, start=0, stop=stop, side=options.side)
    with loader as batches:
        for batch in batches:
            labels = batch.labels.tolist()
            for image, label in zip(batch.images, labels, strict=True):
                # The order is computed anew: a loader that mixes up its slots must not pass.
                epoch, sample = order.at(position)
                expected = _reference(
                    index.read(sample),
                    epoch=epoch,
                    sample=sample,
                    side=options.side,
                )
                psnr.append(_psnr(image, expected))
                wrong_labels += label != int(index.label[sample])
                position += 1

    # A stream that ends early would otherwise pass with the images that came.
    assert position == stop, f"{position} of {stop} images"
    return {
        "images": position,
        "wrong_labels": wrong_labels,
        "identical": psnr.count(IDENTICAL),
        "psnr_median": median(psnr),
        "psnr_min": min(psnr),
    }


def _psnr(image: torch.Tensor, expected: torch.Tensor) -> float:
    difference = image.float() - expected.float()
    error = difference.square().mean().item()
    if error == 0:
        return IDENTICAL
    return 10 * math.log10(255**2 / error)


def _reference(data: bytes, *, epoch: int, sample: int, side: int) -> torch.Tensor:
    """Decode the whole image with Pillow, crop, resample."""
    # Part and view are 0: there is one set of shards, and each image is seen once in an epoch.
    draw = Draw(0, epoch, sample, 0)
    random = CounterRandom(augmentation_key(SEED, draw))

    # Pillow decodes all pixels here: no part of the decoder under test is used.
    decoded = crops.decode(data)
    height, width = decoded.shape[:2]
    box = crops.random_crop_box(
        width,
        height,
        area=AREA,
        aspect=ASPECT,
        random=random,
    )

    # After the box: both take from one counter, so their order is part of the recipe.
    flip = random.uniform() < 0.5
    request = crops.CropRequest(
        box=box,
        size=side,
        interpolation="bilinear",
        antialias=False,
        flip=flip,
    )
    return crops.crop_and_resize(decoded, request)


if __name__ == "__main__":
    print(json.dumps(run()), flush=True)
