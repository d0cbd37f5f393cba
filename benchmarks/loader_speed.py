"""Compare training_batches with webdataset, torchvision, OpenCV, DALI, SPDL and TurboLoader.

    python benchmarks/loader_speed.py --images PHOTOS --workers 2 --rounds 5 --json results.json
    python benchmarks/loader_speed.py --images PHOTOS --png            # the same photographs as PNG
    python benchmarks/loader_speed.py --images PHOTOS --png-side 32    # as in CIFAR, output 32 px
    python benchmarks/loader_speed.py --images PHOTOS --views          # several views of an image

Every loader runs in a fresh process (except with --toy), on the same shards of
data_prep/make_shards.py, which are in the page cache. Our pixels are compared with Pillow's first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.corpora.photo_folder import (
    as_png,
    given_photos,
    noise_photos,
    write_photo_folder,
)
from benchmarks.loader import contenders, pixels
from benchmarks.loader.contenders import (
    CONTENDERS,
    RIVALS,
    VIEW_COSTS,
    VIEW_GAINS,
    VIEWS,
    Contender,
    sample_order,
    why_missing,
)
from benchmarks.loader.ours import SIDE
from benchmarks.measuring import (
    ROOT,
    Failed,
    make_shards_command,
    parser_of,
    ratio,
    run_benchmark,
    run_command,
)
from vitscale.config.errors import run_script
from vitscale.data.index import read_split
from vitscale.images.crops import DECODERS, missing

# A fast decoder may differ from Pillow by rounding; a wrong box gives a far lower PSNR.
LEAST_PSNR = 30.0
# Their versions are printed; OpenCV and DALI have a package for each kind of machine.
PACKAGES = (
    "torch",
    "torchvision",
    "webdataset",
    "pillow",
    "simplejpeg",
    "opencv-python-headless",
    "opencv-python",
    "nvidia-dali-cuda130",
    "spdl",
    "turboloader",
)


def main() -> None:
    options = parse_arguments()
    run_benchmark(options, lambda work: measure(work, options), *PACKAGES)


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    if options.images:
        photos = given_photos(options.images)
        origin = "given photographs"
    else:
        photos = noise_photos(**options.noise)
        origin = "noise"
    kind = "JPEG"
    if options.png or options.png_side:
        photos = as_png(photos, side=options.png_side)
        kind = "PNG"
    total_bytes = int(options.total_mib * 2**20)
    source = write_photo_folder(work / "photos", photos, total_bytes=total_bytes)

    shards = work / "shards"
    # The product's own commands, so that what is read is what users have.
    make_shards = make_shards_command(
        source.root, shards, "images.check=header", shard_mib=options.shard_mib
    )
    run_command(make_shards)
    # With entry points, which users make by this command.
    run_command(
        [sys.executable, "data_prep/verify_shards.py", shards, "--entry-points"]
    )

    # What make_shards rejects would be missing for all loaders, without a word.
    num = read_split(shards, split="train").num_samples
    print(f"{num:,} {kind} of {origin}, {source.num_bytes / 1e6:,.0f} MB")
    if num != len(source.digests):
        raise Failed(f"{num} images in shards of {len(source.digests)}")

    # Pixels first: the speed of a loader that gives other images is worth nothing.
    return {
        "pixels": measure_pixels(shards, options),
        "rates": measure_rates(shards, options),
    }


def child(script: ModuleType, *arguments: object, fresh: bool) -> dict[str, Any]:
    """Run the script in a fresh process, or in this one, which is faster; returns its result."""
    words = [str(argument) for argument in arguments]
    if not fresh:
        result: dict[str, Any] = script.run(words)
        return result
    # Fresh: threads and caches that one library leaves behind would slow the next, or help it.
    command = [sys.executable, str(script.__file__), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    # The last line: libraries print warnings before it.
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def measure_pixels(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare our images with Pillow's pixels of the same boxes. Raises Failed."""
    results = {}
    print("\nours beside Pillow decoding the whole image, same boxes")
    for decoder in DECODERS:
        if missing(decoder) is not None:
            print(f"{decoder:12} left out: {missing(decoder)}")
            continue
        result = child(
            pixels,
            shards,
            *("--decoder", decoder, "--side", options.side),
            *("--workers", options.workers, "--images", options.check_images),
            fresh=not options.toy,
        )

        results[decoder] = result
        print(
            f"{decoder:12} {result['images']} images, {result['identical']} identical; PSNR median "
            f"{result['psnr_median']:.1f} dB, least {result['psnr_min']:.1f} dB (99: identical)"
        )
        if result["wrong_labels"] or result["psnr_min"] < LEAST_PSNR:
            raise Failed(f"{decoder}: wrong images or labels: {result}")
    return results


def measure_rates(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    compared = VIEWS if options.views else CONTENDERS
    present = [name for name in compared if left_out(name) is None]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    index = read_split(shards, split="train")
    order = sample_order(shards)
    all_labels = set(index.label.tolist())

    # In turn, so that a machine that becomes slower does so for all.
    for turn in range(options.rounds):
        for name in present:
            result = child(
                contenders,
                name,
                shards,
                *("--workers", options.workers, "--seconds", options.seconds),
                *("--side", options.side),
                fresh=not options.toy,
            )

            labels = result.pop("labels")
            is_right = set(labels) <= all_labels
            # Others shuffle by chance: of them only the set of labels is known.
            if compared[name].in_our_order:
                samples = [order.at(position)[1] for position in range(len(labels))]
                is_right = labels == index.label[samples].tolist()
            if not is_right:
                raise Failed(f"{name} gave other labels than the index")

            runs[name].append({**result, "load": os.getloadavg()[0]})
            print(f"  round {turn + 1}: {name} {result['rate']:.0f} img/s", flush=True)
    print_rates(runs, compared)
    return runs


def left_out(name: str) -> str | None:
    """Why a contender cannot run here, or None."""
    # Our variants are named after their decoder, `region_antialias` for example.
    decoder = name.partition("_")[0]
    if decoder in DECODERS and name not in RIVALS:
        return missing(decoder)
    return why_missing(name)


def print_rates(
    runs: dict[str, list[dict[str, float]]], compared: dict[str, Contender]
) -> None:
    rates = {name: [run["rate"] for run in rounds] for name, rounds in runs.items()}
    first = next(iter(rates))
    print(
        f"\n{'img/s':18} {'min':>6} {'median':>7} {'max':>6} {'first batch, s':>15}  x {first}"
    )
    for name, contender in compared.items():
        if name not in rates:
            print(f"{name:18} left out: {left_out(name)}")
            continue
        low = min(rates[name])
        high = max(rates[name])
        start_s = median(run["start_s"] for run in runs[name])
        print(
            f"{name:18} {low:6.0f} {median(rates[name]):7.0f} {high:6.0f} {start_s:15.2f}  "
            f"{ratio(rates[name], rates[first])} {contender.title}"
        )

    if compared is VIEWS:
        for several, one in VIEW_COSTS:
            cost = ratio(rates[one], rates[several])
            print(f"an image of {several}: {cost} of the time of {one}")
        for name, rival in VIEW_GAINS:
            if rival in rates:
                print(f"{name} / {rival}: {ratio(rates[name], rates[rival])}")
        return

    # A rival that is not installed cannot be the best; docs/benchmarks.md names those that were.
    rivals = [name for name in RIVALS if name in rates]
    best = max(rivals, key=lambda name: median(rates[name]))
    # DECODERS begins with the fastest, which a machine may lack.
    ours = next(name for name in DECODERS if name in rates)
    print(f"ours ({ours}) / {first}: {ratio(rates[ours], rates[first])}")
    print(f"ours ({ours}) / {best}, the best rival: {ratio(rates[ours], rates[best])}")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument(
        "--images", type=Path, help="folder or tar of JPEGs; default: noise"
    )
    parser.add_argument(
        "--png", action="store_true", help="encode the photographs as PNG"
    )
    parser.add_argument(
        "--png-side", type=int, help="PNG of this many pixels a side; output too"
    )
    parser.add_argument(
        "--views", action="store_true", help="one, two and ten crops of each image"
    )
    parser.add_argument(
        "--total-mib", type=float, default=300, help="images are repeated"
    )
    parser.add_argument("--shard-mib", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8, help="per loader and round")
    parser.add_argument(
        "--check-images", type=int, default=512, help="to compare with Pillow"
    )
    parser.set_defaults(noise={})

    # Only defaults change, so what is given with --toy still counts.
    if parser.parse_args().toy:
        parser.set_defaults(
            rounds=1,
            total_mib=3,
            shard_mib=1,
            workers=1,
            seconds=0,
            check_images=64,
            noise={"width": 160, "height": 120, "num": 8},
        )
    options = parser.parse_args()

    # Without enlarging: an image of 32 pixels is trained on at 32.
    options.side = options.png_side or SIDE
    return options


if __name__ == "__main__":
    run_script(main)
