"""The loaders of loader_speed, on the same shards: random crop, flip, batches of 64.

    python benchmarks/loader/contenders.py NAME SHARDS --workers 2 --seconds 8

Owns: each loader as its authors would write it, and timing one of them in its own process.
Leaves out: turns and tables (`loader_speed`), checks of pixels (`pixels`).

`torchvision`, `opencv`, `simplejpeg_torch` and `decode_only` read through our index in our order,
so only decoding and batching differ from ours. simplejpeg leaves PNG images to Pillow.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.loader.ours import (
    BATCH,
    GLOBAL_AREA,
    LOCAL_AREA,
    LOCAL_SIDE,
    NUM_LOCALS,
    SEED,
    SIDE,
    Batches,
    Task,
    ours,
    views_of,
)
from vitscale.data.index import read_split
from vitscale.data.order import SampleOrder
from vitscale.images.crops import FORMATS

# Shares of an image's area, and aspects of a crop: the recipe of the product, given to all.
AREA = (0.05, 1.0)
ASPECT = (3 / 4, 4 / 3)
PNG_START = b"\x89PNG"
MEAN = (0.5, 0.5, 0.5)
STD = (0.5, 0.5, 0.5)

Decode = Callable[[bytes], torch.Tensor]


def webdataset_pillow(task: Task) -> Batches:
    """The loop of webdataset's documentation: shards and a buffer shuffled, Pillow, torchvision."""
    import webdataset
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(task.side, scale=AREA),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    dataset = (
        webdataset.WebDataset(tar_paths(task), shardshuffle=100)
        # Without an end: a short corpus must not cost a start of the workers inside the clock.
        .repeat()
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg;jpeg;JPEG;png", "cls")
        .map_tuple(transform, int)
        .batched(BATCH, partial=False)
    )
    yield from webdataset.WebLoader(dataset, batch_size=None, **_processes(task))


def tar_paths(task: Task) -> list[str]:
    return [str(path) for path in sorted(task.shards.glob("*.tar"))]


def _processes(task: Task) -> dict[str, Any]:
    """For torch's DataLoader: workers from a fork server, as ours have one.

    From Python's own: that of the product does not import the main module, where these classes are.
    """
    context = None
    # Without workers, DataLoader refuses a context.
    if task.workers:
        context = multiprocessing.get_context("forkserver")
    return {"num_workers": task.workers, "multiprocessing_context": context}


class _Stored(Dataset[tuple[torch.Tensor, int]]):
    """Samples by position in training, through our index."""

    def __init__(self, task: Task, make_decode: Callable[[int], Decode]) -> None:
        self.index = read_split(task.shards, split="train")
        self.order = sample_order(task.shards)
        self.make_decode = make_decode
        self.side = task.side
        self.decode: Decode | None = None

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        # Made in the worker: a closure cannot be pickled on its way there.
        if self.decode is None:
            self.decode = self.make_decode(self.side)
        _, sample = self.order.at(position)
        image = self.decode(self.index.read(sample))
        return image, self.index.locate(sample).label


def sample_order(shards: Path) -> SampleOrder:
    index = read_split(shards, split="train")
    return SampleOrder(split=index, seed=SEED)


def map_style(task: Task, *, make_decode: Callable[[int], Decode]) -> Batches:
    # A million batches: no loader reaches an end, which would cost it a start of its workers.
    positions = range(BATCH << 20)
    yield from DataLoader(
        _Stored(task, make_decode),
        batch_size=BATCH,
        sampler=positions,
        **_processes(task),
    )


def torchvision_decode(side: int) -> Decode:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomResizedCrop(side, scale=AREA), v2.RandomHorizontalFlip()]
    )

    def decode(data: bytes) -> torch.Tensor:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return transform(decode_image(stored, mode=ImageReadMode.RGB))

    return decode


def torchvision_views(
    task: Task, *, area: tuple[float, float], num_local: int = 0
) -> Batches:
    """Two crops, and `num_local` small ones, of one decode. Yields the first crops."""
    make_decode = partial(_torchvision_views, area=area, num_local=num_local)
    for views, labels in map_style(task, make_decode=make_decode):
        yield views[0], labels


def _torchvision_views(
    side: int, *, area: tuple[float, float], num_local: int
) -> Callable[[bytes], list[torch.Tensor]]:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    flip = v2.RandomHorizontalFlip()
    crop = v2.RandomResizedCrop(side, scale=area)
    small_crop = v2.RandomResizedCrop(LOCAL_SIDE, scale=LOCAL_AREA)

    def decode(data: bytes) -> list[torch.Tensor]:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = decode_image(stored, mode=ImageReadMode.RGB)
        crops = [crop] * 2 + [small_crop] * num_local
        return [flip(crop(pixels)) for crop in crops]

    return decode


def opencv_decode(side: int) -> Decode:
    import cv2

    # One thread for each worker, as all have: OpenCV would start one for each core in each.
    cv2.setNumThreads(0)

    def decode(data: bytes) -> torch.Tensor:
        # simplejpeg knows no PNG, which OpenCV's users would read by OpenCV, not by Pillow.
        if data.startswith(PNG_START):
            stored = np.frombuffer(data, np.uint8)
            whole = cv2.imdecode(stored, cv2.IMREAD_COLOR_RGB)
        else:
            whole = _whole(data)
        crop, flip = _random_crop(whole)
        resized = cv2.resize(crop, (side, side), interpolation=cv2.INTER_LINEAR)
        if flip:
            resized = cv2.flip(resized, 1)
        return torch.from_numpy(resized.transpose(2, 0, 1))

    return decode


def simplejpeg_torch_decode(side: int) -> Decode:
    def decode(data: bytes) -> torch.Tensor:
        crop, flip = _random_crop(_whole(data))
        # [1, 3, height, width]: interpolate resizes batches alone.
        planes = torch.from_numpy(crop).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            planes,
            size=(side, side),
            mode="bilinear",
        )[0]
        if flip:
            return resized.flip(-1)
        return resized

    return decode


def only_decode(side: int) -> Decode:
    """No crop, no resize, no batch of pixels: what decoding whole images costs at least."""

    def decode(data: bytes) -> torch.Tensor:
        return torch.tensor(_whole(data).shape[0])

    return decode


def _whole(data: bytes) -> np.ndarray:
    import simplejpeg

    try:
        # In the rivals' favour: both options are faster, and less exact than our own decoder.
        return simplejpeg.decode_jpeg(
            data, colorspace="RGB", fastdct=True, fastupsample=True
        )
    except ValueError:  # PNG, CMYK and other rarities
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        return np.array(image.convert("RGB"))


def _random_crop(pixels: np.ndarray) -> tuple[np.ndarray, bool]:
    """torchvision's box of this image, and whether to mirror it."""
    from torchvision.transforms import RandomResizedCrop

    # get_params reads the shape alone, so an image without channels saves a conversion.
    shape = torch.empty(0, *pixels.shape[:2])
    top, left, height, width = RandomResizedCrop.get_params(
        shape, list(AREA), list(ASPECT)
    )
    crop = pixels[top : top + height, left : left + width]
    flip = bool(torch.rand(()) < 0.5)
    return crop, flip


def dali(task: Task) -> Batches:
    """NVIDIA DALI on the CPU: threads, and decoding of the crop alone. uint8 [B, S, S, 3]."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=BATCH,
        num_threads=task.workers,
        device_id=None,
        prefetch_queue_depth=2,
    )
    def pipeline() -> Any:
        stored, label = fn.readers.webdataset(
            paths=tar_paths(task),
            ext=["jpg;jpeg;png", "cls"],
            random_shuffle=True,
            # The default fills in an empty component, without a word.
            missing_component_behavior="error",
        )
        crop = fn.decoders.image_random_crop(
            stored,
            device="cpu",
            random_area=list(AREA),
            random_aspect_ratio=list(ASPECT),
        )
        resized = fn.resize(
            crop,
            resize_x=task.side,
            resize_y=task.side,
            interp_type=types.INTERP_LINEAR,
            # As ours, which samples the same pixels.
            antialias=False,
        )
        flipped = fn.flip(resized, horizontal=fn.random.coin_flip())
        return flipped, label

    built = pipeline()
    built.build()
    while True:
        images, labels = built.run()
        # DALI gives the bytes of each .cls member.
        numbers = [int(bytes(labels.at(i))) for i in range(BATCH)]
        yield torch.from_numpy(images.as_array()), torch.tensor(numbers)


def spdl(task: Task) -> Batches:
    """SPDL's pipeline of threads. Its own decoder needs FFmpeg's libraries: simplejpeg instead."""
    from spdl.pipeline import PipelineBuilder

    # Its threads are the parallel part: torch's own, in each of them, would be in their way.
    torch.set_num_threads(1)
    samples = _Stored(task, simplejpeg_torch_decode)
    pipeline = (
        PipelineBuilder()
        .add_source(itertools.count())
        .pipe(samples.__getitem__, concurrency=task.workers)
        .aggregate(BATCH)
        .pipe(torch.utils.data.default_collate)
        # Two batches ahead, as each worker of ours and of DataLoader has.
        .add_sink(2)
        .build(num_threads=task.workers)
    )
    with pipeline.auto_stop():
        yield from pipeline


def turboloader(task: Task) -> Batches:
    """TurboLoader, as its documentation says: one tar of JPEGs, threads, float32.

    It gives no labels but the numbers of the images. Shares of the area are 0.08 to 1: no setting.
    """
    from turboloader import DataLoader, ImageNetNormalize

    index = read_split(task.shards, split="train")
    # It reads one tar, which is written once for all rounds.
    path = task.shards.parent / "one.tar"
    if not path.exists():
        with tarfile.open(path, "w") as tar:
            for sample in range(index.num_samples):
                data = index.read(sample)
                member = tarfile.TarInfo(f"{sample:09}.jpg")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    loader = DataLoader(
        str(path),
        batch_size=BATCH,
        num_workers=task.workers,
        image_size=task.side,
        output_format="pytorch",
        transform=ImageNetNormalize(),
        shuffle=True,
        drop_last=True,
        train_aug=True,
    )
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for images, batch in loader:
            labels = index.label[np.asarray(batch["indices"])]
            yield torch.from_numpy(images), torch.from_numpy(labels)


@dataclass(frozen=True, slots=True)
class Contender:
    make: Callable[[Task], Batches]
    title: str
    needs: str = "torch"
    """Python module that it needs; left out without it."""
    in_our_order: bool = True
    """Its labels are known in advance."""


def _mapped(make_decode: Callable[[int], Decode]) -> Callable[[Task], Batches]:
    return partial(map_style, make_decode=make_decode)


# The first is what the others are divided by; then the rivals, and at last our own variants.
CONTENDERS = {
    "webdataset": Contender(
        webdataset_pillow,
        "webdataset, Pillow, torchvision; antialias, float32",
        needs="webdataset",
        in_our_order=False,
    ),
    "torchvision": Contender(
        _mapped(torchvision_decode),
        "decode_image, transforms v2; antialias",
        needs="torchvision",
    ),
    "opencv": Contender(
        _mapped(opencv_decode), "simplejpeg (PNG: OpenCV), OpenCV resize", needs="cv2"
    ),
    "simplejpeg_torch": Contender(
        _mapped(simplejpeg_torch_decode), "simplejpeg, torch resize"
    ),
    "decode_only": Contender(
        _mapped(only_decode), "simplejpeg, whole images, nothing else"
    ),
    "dali": Contender(
        dali,
        "DALI, threads, decodes the crop alone",
        needs="nvidia.dali",
        in_our_order=False,
    ),
    "spdl": Contender(
        spdl,
        "SPDL, threads, simplejpeg, torch resize",
        needs="spdl.pipeline",
        in_our_order=False,
    ),
    "turboloader": Contender(
        turboloader,
        "TurboLoader, threads, decodes the crop alone; float32",
        needs="turboloader",
        in_our_order=False,
    ),
    "region": Contender(partial(ours, decoder="region"), "ours"),
    "region_from_top": Contender(
        partial(ours, decoder="region", entry_points=False),
        "ours, without entry points",
    ),
    "region_antialias": Contender(
        partial(ours, decoder="region", antialias=True), "ours; antialias"
    ),
    "whole": Contender(partial(ours, decoder="whole"), "ours"),
}
RIVALS = (
    "webdataset",
    "torchvision",
    "opencv",
    "simplejpeg_torch",
    "dali",
    "spdl",
    "turboloader",
)

# Views of each image from one decode. `wide`: the area of this benchmark's crops; `global`: that of
# DINOv2's two large views.
VIEWS = {
    "wide_1": Contender(partial(ours, views=views_of(AREA, 1)), "one crop"),
    "wide_2": Contender(partial(ours, views=views_of(AREA, 2)), "two crops"),
    "torchvision_wide_2": Contender(
        partial(torchvision_views, area=AREA), "two crops; antialias", "torchvision"
    ),
    "global_1": Contender(partial(ours, views=views_of(GLOBAL_AREA, 1)), "one"),
    "global_2": Contender(partial(ours, views=views_of(GLOBAL_AREA, 2)), "two"),
    "dino": Contender(
        partial(ours, views=views_of(GLOBAL_AREA, 2, NUM_LOCALS)), "two and eight"
    ),
    "dino_antialias": Contender(
        partial(ours, views=views_of(GLOBAL_AREA, 2, NUM_LOCALS), antialias=True),
        "two and eight; antialias",
    ),
    "torchvision_dino": Contender(
        partial(torchvision_views, area=GLOBAL_AREA, num_local=NUM_LOCALS),
        "two and eight; antialias",
        "torchvision",
    ),
}
# Pairs of them: what the first costs in times of the second, and how often it is as fast.
VIEW_COSTS = (("wide_2", "wide_1"), ("global_2", "global_1"), ("dino", "global_1"))
VIEW_GAINS = (
    ("wide_2", "torchvision_wide_2"),
    ("dino", "torchvision_dino"),
    ("dino_antialias", "torchvision_dino"),
)


def why_missing(name: str) -> str | None:
    module = (CONTENDERS | VIEWS)[name].needs
    # Of `nvidia.dali` without `nvidia`, find_spec raises instead of returning None.
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(module) is not None:
            return None
    return f"{module} is not installed"


def measure(name: str, task: Task, *, seconds: float) -> dict[str, Any]:
    """Seconds to the first batch, then images per second after each worker has given three."""
    start = time.perf_counter()
    labels: list[int] = []
    images = 0

    def take() -> None:
        nonlocal images
        pixels, numbers = next(batches)
        if name != "decode_only":
            assert pixels is not None and len(pixels) == BATCH
            # Sorted, since DALI has the channels last.
            assert sorted(pixels.shape[1:]) == [3, task.side, task.side], pixels.shape
        images += len(numbers)
        labels.extend(numbers.tolist())

    batches = (CONTENDERS | VIEWS)[name].make(task)
    take()
    first = time.perf_counter() - start

    # What the workers prepared while others still started would count as speed.
    for _ in range(3 * task.workers):
        take()

    warm_images = images
    warm_at = time.perf_counter()
    elapsed = 0.0
    # At least a batch of each worker, however short the time is.
    while elapsed < seconds or images - warm_images < BATCH * task.workers:
        take()
        elapsed = time.perf_counter() - warm_at
    rate = (images - warm_images) / elapsed
    batches.close()  # ends the workers, which would disturb the next measurement
    return {"rate": rate, "start_s": first, "images": images, "labels": labels}


def run(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CONTENDERS | VIEWS)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--side", type=int, default=SIDE)
    options = parser.parse_args(arguments)
    task = Task(options.shards, options.workers, options.side)
    return measure(options.name, task, seconds=options.seconds)


if __name__ == "__main__":
    print(json.dumps(run()), flush=True)
    os._exit(0)  # some libraries would wait for their threads
