"""Measure single properties of our loader, each in a process of its own.

    python benchmarks/loader/properties.py pixels SHARDS --decoder region

Owns: pixels compared with Pillow's, reading bytes, time to the first batch after a resume, memory.
Leaves out: turns and tables (`loader_speed`), whole loaders (`contenders`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no type information
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.loader.contenders import AREA, sample_order
from benchmarks.loader.ours import BATCH, SEED, SIDE, data_settings, training_loader
from vitscale.data.index import read_split
from vitscale.data.loader import open_loader
from vitscale.data.order import Draw, SampleOrder, TrainingOrder
from vitscale.data.samples import SplitReader, augmentation_key
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images import crops

# ImageNet-21k of 110 kB images in shards of 256 MiB.
MANY_SAMPLES, MANY_SHARDS = 14_197_122, 5_817
EARLY, LATE = 0.01, 0.9
# Stands for infinity, which JSON does not have.
IDENTICAL = 99.0


def pixels(options: argparse.Namespace) -> dict[str, Any]:
    """PSNR in dB of each image against Pillow's pixels of the same box; labels of the index."""
    settings = data_settings(options.shards, workers=options.workers, decoder=options.decoder)
    index = read_split(options.shards, split="train")
    order, reader = sample_order(options.shards), SplitReader(index)
    stop = min(options.images, index.num_samples) // BATCH * BATCH
    psnr: list[float] = []
    wrong_labels = position = 0
    loader = training_loader(settings, start=0, stop=stop, side=options.side)
    with open_loader(loader) as batches:
        for batch in batches:
            if options.corrupt == "pixels":
                batch.images[-1] = batch.images[-1].flip(-1)
            if options.corrupt == "labels":
                batch.labels[-1] = (batch.labels[-1] + 1) % len(index.classes)
            for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
                epoch, sample = order.at(position)
                expected = _reference(
                    reader.bytes_of(sample), epoch=epoch, sample=sample, side=options.side
                )
                error = (image.float() - expected.float()).square().mean().item()
                psnr.append(10 * math.log10(255**2 / error) if error else IDENTICAL)
                wrong_labels += label != reader.label(sample)
                position += 1
    lost = 1 if options.corrupt == "count" else 0
    return {
        "images": position - lost,
        "expected": stop,
        "wrong_labels": wrong_labels,
        "identical": psnr.count(IDENTICAL),
        "psnr_median": median(psnr),
        "psnr_min": min(psnr),
    }


def _reference(data: bytes, *, epoch: int, sample: int, side: int) -> torch.Tensor:
    """Decode the whole image with Pillow, crop, resample."""
    random = CounterRandom(augmentation_key(SEED, Draw(0, epoch, sample, 0)))
    decoded = crops.decode(data)
    height, width = decoded.shape[:2]
    box = crops.random_crop_box(width, height, area=AREA, aspect=(3 / 4, 4 / 3), random=random)
    flip = random.uniform() < 0.5
    request = crops.CropRequest(
        box=box, size=side, interpolation="bilinear", antialias=False, flip=flip
    )
    return crops.crop_and_resize(decoded, request)


def parse_webdataset(options: argparse.Namespace) -> dict[str, Any]:
    """Every sample as bytes, in the order of the tars, as often as `passes` says."""
    import webdataset

    tars = [str(path) for path in sorted(options.shards.glob("*.tar"))]
    samples = num_bytes = 0
    start = time.perf_counter()
    for _ in range(options.passes):
        for sample in webdataset.WebDataset(tars, shardshuffle=False):
            samples += 1
            num_bytes += len(sample.get("jpg") or sample["png"])
    seconds = time.perf_counter() - start
    return {"samples": samples, "bytes": num_bytes, "rate": samples / seconds}


def parse_index(options: argparse.Namespace) -> dict[str, Any]:
    """Every sample as bytes, in the order of training, which is a random one."""
    index = read_split(options.shards, split="train")
    order, reader = sample_order(options.shards), SplitReader(index)
    samples = num_bytes = 0
    start = time.perf_counter()
    for position in range(index.num_samples * options.passes):
        _, sample = order.at(position)
        num_bytes += len(reader.bytes_of(sample))
        samples += 1
    seconds = time.perf_counter() - start
    return {"samples": samples, "bytes": num_bytes, "rate": samples / seconds}


def resume_order(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the samples of the first batch, of an order that has computed nothing."""
    times: dict[float, list[float]] = {EARLY: [], LATE: []}
    lengths = [MANY_SAMPLES // MANY_SHARDS] * MANY_SHARDS
    lengths[-1] += MANY_SAMPLES - sum(lengths)
    for turn in range(options.passes + 1):
        for share in (EARLY, LATE):
            start = time.perf_counter()
            part = SampleOrder(shard_lengths=tuple(lengths), fingerprint="synthetic", seed=turn)
            order = TrainingOrder(parts=(part,), shares=(1_000_000,))
            first = int(MANY_SAMPLES * share) // BATCH * BATCH
            chosen = [order.at(position) for position in range(first, first + BATCH)]
            if turn:  # the first turn warms numpy
                times[share].append(1000 * (time.perf_counter() - start))
            assert len({draw.sample for draw in chosen}) == BATCH
    return {"early_ms": median(times[EARLY]), "late_ms": median(times[LATE])}


def resume_shards(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from opening the index to the first batch, workers started, at `share`."""
    start = time.perf_counter()
    settings = data_settings(options.shards, workers=options.workers, decoder=options.decoder)
    num = read_split(options.shards, split="train").num_samples
    first = int(num * options.share) // BATCH * BATCH
    loader = training_loader(settings, start=first, stop=first + BATCH * 64)
    with open_loader(loader) as batches:
        next(batches)
        return {"seconds": time.perf_counter() - start}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """MiB of the trainer and its workers after every batch; shared pages count once (PSS)."""
    settings = data_settings(options.shards, workers=options.workers, decoder=options.decoder)
    num = read_split(options.shards, split="train").num_samples * options.passes
    sizes = []
    with open_loader(training_loader(settings, start=0, stop=num // BATCH * BATCH)) as batches:
        for _ in batches:
            own = psutil.Process()
            tree = [own, *own.children(recursive=True)]
            sizes.append(sum(process.memory_full_info().pss for process in tree) / 2**20)
    tenth = max(1, len(sizes) // 10)
    return {
        "images": len(sizes) * BATCH,
        "first_tenth": max(sizes[:tenth]),
        "last_tenth": max(sizes[-tenth:]),
        "peak": max(sizes),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "pixels": pixels,
    "parse_webdataset": parse_webdataset,
    "parse_index": parse_index,
    "resume_order": resume_order,
    "resume_shards": resume_shards,
    "memory": memory,
}


def run(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--decoder", default="region")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--share", type=float, default=EARLY)
    parser.add_argument("--corrupt", choices=("pixels", "labels", "count"))
    options = parser.parse_args(arguments)
    return PARTS[options.part](options)


if __name__ == "__main__":
    print(json.dumps(run()), flush=True)
