"""Compare several views of each image with one view, and with torchvision on the same images.

    python benchmarks/view_speed.py --images PHOTOS --rounds 5 --json results.json

Each candidate runs in a fresh process with the same number of loader processes, on the same shards
of data_prep/make_shards.py, which are in the page cache. torchvision decodes each image once, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.corpora.photo_folder import (
    given_photos,
    noise_photos,
    write_photo_folder,
)
from benchmarks.loader.contenders import AREA, _processes, _Stored
from benchmarks.loader.ours import BATCH, SEED, SIDE, Task
from benchmarks.measuring import (
    ROOT,
    Failed,
    make_shards_command,
    parser_of,
    ratio,
    run_benchmark,
    run_command,
    spread,
)
from vitscale.config.errors import run_script
from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

# DINO's views: two of the image's size, and eight small ones of small boxes.
LOCAL_AREA = (0.05, 0.32)
LOCAL_SIDE = 96
TWO = ({"name": "global", "count": 2, "crop_area": AREA},)
LOCALS = {
    "name": "local",
    "count": 8,
    "image_size": LOCAL_SIDE,
    "crop_area": LOCAL_AREA,
}
# Batches before the clock starts: each loader process has given three by then.
WARM_BATCHES = 6


def ours(task: Task, *, views: tuple[dict[str, Any], ...]) -> Iterator[Any]:
    settings = DataSettings.model_validate(
        {
            "path": str(task.shards),
            "global_batch": BATCH,
            "num_workers": task.workers,
            "crop_area": AREA,
            "views": views,
        }
    )

    loader = training_batches(
        open_training_set(settings, seed=SEED),
        settings=settings,
        image_size=task.side,
        seed=SEED,
        start=0,
        stop=BATCH << 20,
        rank=0,
        world_size=1,
        micro_batch=BATCH,
        pin_memory=False,
    )
    with loader as batches:
        yield from batches


def _torchvision_decode(
    side: int, *, num_local: int
) -> Callable[[bytes], torch.Tensor]:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    flip = v2.RandomHorizontalFlip()
    crop = v2.RandomResizedCrop(side, scale=AREA)
    small_crop = v2.RandomResizedCrop(LOCAL_SIDE, scale=LOCAL_AREA)

    def decode(data: bytes) -> torch.Tensor:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = decode_image(stored, mode=ImageReadMode.RGB)
        views = [flip(crop(pixels)) for _ in range(2)]
        views += [flip(small_crop(pixels)) for _ in range(num_local)]
        return torch.cat([view.flatten() for view in views])

    return decode


def torchvision(task: Task, *, num_local: int) -> Iterator[Any]:
    """Two crops, and `num_local` small ones, of one decode; transforms v2 on tensors."""
    yield from DataLoader(
        _Stored(task, partial(_torchvision_decode, num_local=num_local)),
        batch_size=BATCH,
        sampler=range(BATCH << 20),
        **_processes(task),
    )


CANDIDATES: dict[str, Callable[[Task], Iterator[Any]]] = {
    "one view": partial(ours, views=()),
    "two views": partial(ours, views=TWO),
    "two and eight": partial(ours, views=(*TWO, LOCALS)),
    "torchvision, two": partial(torchvision, num_local=0),
    "torchvision, two and eight": partial(torchvision, num_local=8),
}
# Pairs of rates that are compared: the second over the first for times, so a cost is above 1.
COSTS = (("one view", "two views"), ("one view", "two and eight"))
GAINS = (
    ("two views", "torchvision, two"),
    ("two and eight", "torchvision, two and eight"),
)


def measure_one(name: str, task: Task, *, seconds: float) -> float:
    """Images per second of a candidate, after the first batches."""
    batches = CANDIDATES[name](task)
    for _ in islice(batches, WARM_BATCHES):
        pass

    start = time.perf_counter()
    num_images = 0
    elapsed = 0.0
    while elapsed < seconds or not num_images:
        next(batches)
        num_images += BATCH
        elapsed = time.perf_counter() - start
    return num_images / elapsed


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    photos = noise_photos(**options.noise)
    if options.images:
        photos = given_photos(options.images)
    source = write_photo_folder(
        work / "photos", photos, total_bytes=int(options.total_mib * 2**20)
    )
    shards = work / "shards"
    run_command(
        make_shards_command(source.root, shards, "images.check=header", shard_mib=24)
    )
    run_command(
        [sys.executable, "data_prep/verify_shards.py", shards, "--entry-points"]
    )

    rates: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for number in range(options.rounds):
        for name in CANDIDATES:
            rates[name].append(_in_fresh_process(name, shards, options))
            print(
                f"  round {number + 1}: {name} {rates[name][-1]:.0f} img/s", flush=True
            )

    print("\nimages/s")
    for name in CANDIDATES:
        print(f"{name:28} {spread(rates[name])}")
    for one, other in COSTS:
        print(
            f"{other}: {ratio(rates[one], rates[other])} of the time of {one}, an image"
        )
    for one, other in GAINS:
        print(f"{one} / {other}: {ratio(rates[one], rates[other])}")
    return {"rates": rates, "median": {n: median(r) for n, r in rates.items()}}


def _in_fresh_process(name: str, shards: Path, options: argparse.Namespace) -> float:
    # No candidate may profit from what another one left in memory.
    command = [sys.executable, __file__, "--candidate", name, "--shards", str(shards)]
    command += [
        "--workers",
        str(options.workers),
        "--seconds",
        str(options.seconds),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{name}: exit code {done.returncode}\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--images", type=Path, help="folder or tar; default: noise")
    parser.add_argument("--total-mib", type=float, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(noise={})
    if parser.parse_args().toy:
        tiny = {"width": 160, "height": 120, "num": 8}
        parser.set_defaults(rounds=1, total_mib=3, seconds=0, workers=1, noise=tiny)
    options = parser.parse_args()
    if options.candidate:
        task = Task(options.shards, options.workers, SIDE)
        print(measure_one(options.candidate, task, seconds=options.seconds), flush=True)
        return
    run_benchmark(options, lambda work: measure(work, options), "torchvision")


if __name__ == "__main__":
    run_script(main)
