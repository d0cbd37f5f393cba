"""Measure the search for duplicates: catch rates, false positives and cost.

    python benchmarks/near_duplicates.py --images FOLDER [--different FOLDER ...]
    python benchmarks/near_duplicates.py --scale 100000 1000000  time and memory of the search

Copies are made of each image, which must all be different, and compared with it as a pair: by their
descriptors, then at the second look. Intervals are Wilson's, at 95 %, over images. False positives:
what `vitscale prepare duplicates --similar` finds in shards of the set, of each folder of
--different, and of scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image, ImageEnhance, ImageOps

    from data_prep.duplicates.second_look import likeness
    from data_prep.duplicates.similar import (
        NUM_FREQUENCIES,
        describe_images,
        has_contrast,
        nearest_similar,
    )
    from vitscale.config.errors import UserError, run_script
    from vitscale.images.crops import FORMATS
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

Picture = Image.Image

# Standard deviations to each side that hold 95 % of a normal distribution.
WILSON_Z = 1.96
NUM_EXAMPLES = 4
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
# Those of common image libraries; copies from the web were resized by any of them.
FILTERS = (
    Image.Resampling.BILINEAR,
    Image.Resampling.BICUBIC,
    Image.Resampling.LANCZOS,
)
MAX_ASPECT_CHANGE = 0.05
# Rows that are drawn at once: the random numbers are float64, four times the descriptors.
BATCH_ROWS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the search for duplicates.")
    parser.add_argument("--images", type=Path, help="folder of different images")
    parser.add_argument(
        "--different", type=Path, nargs="*", default=[], help="folders without copies"
    )
    parser.add_argument(
        "--scale", type=int, nargs="+", metavar="N", help="search N descriptors"
    )
    parser.add_argument("--search", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.search:
        report_search(arguments.search)
    elif arguments.scale:
        # A process for each size, since the peak of a process never falls again.
        for size in arguments.scale:
            search = [sys.executable, __file__, "--search", str(size)]
            subprocess.run(search, check=True)
    elif arguments.images:
        images = read_images(arguments.images)
        report_catch_rates(images)
        report_false_positives(images, arguments.different)
    else:
        parser.error("--images or --scale is needed")


def read_images(folder: Path) -> dict[str, bytes]:
    """Name -> encoded image."""
    # Sorted: an image's number seeds the random numbers of its copies.
    images = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            images[path.name] = path.read_bytes()
    if not images:
        raise UserError("contains no images", where=f"{folder}")
    return images


def encoded(image: Picture, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(image: Picture, quality: int) -> bytes:
    return encoded(image, "JPEG", quality=quality)


def resized(image: Picture, scale: float, rng: random.Random) -> Picture:
    aspect = rng.uniform(1 - MAX_ASPECT_CHANGE, 1 + MAX_ASPECT_CHANGE)
    width = round(image.width * scale * aspect)
    height = round(image.height * scale)
    size = (max(1, width), max(1, height))
    return image.resize(size, rng.choice(FILTERS))


def cropped(image: Picture, share: float) -> Picture:
    margin_x = image.width * (1 - share) / 2
    margin_y = image.height * (1 - share) / 2
    box = (margin_x, margin_y, image.width - margin_x, image.height - margin_y)
    left, upper, right, lower = map(round, box)
    return image.crop((left, upper, right, lower))


def any_copy(image: Picture, rng: random.Random) -> bytes:
    """Resized, mirrored or not, and encoded by chance."""
    image = resized(image, rng.uniform(0.4, 2), rng)
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    quality = rng.randint(30, 95)
    kind = rng.choice(("JPEG", "WEBP"))
    return encoded(image, kind, quality=quality)


def hardest_copy(image: Picture, rng: random.Random) -> bytes:
    """Every promised change at its limit."""
    image = ImageOps.mirror(image)
    return jpeg(resized(image, 0.4, rng), 30)


Manipulation = Callable[[Picture, random.Random], bytes]
# What docs/duplicates.md promises to find: each change alone, then all of them at once.
PROMISED: dict[str, Manipulation] = {
    "JPEG, quality 30": lambda image, rng: jpeg(image, 30),
    "JPEG, quality 31-95": lambda image, rng: jpeg(image, rng.randint(31, 95)),
    "WebP, quality 30-95": lambda image, rng: encoded(
        image, "WEBP", quality=rng.randint(30, 95), method=2
    ),
    "PNG": lambda image, rng: encoded(image, "PNG", compress_level=1),
    "size x 0.4, aspect up to 5 %": lambda image, rng: jpeg(
        resized(image, 0.4, rng), 95
    ),
    "size x 0.4-2, aspect up to 5 %": lambda image, rng: jpeg(
        resized(image, rng.uniform(0.4, 2), rng), 95
    ),
    "mirrored": lambda image, rng: jpeg(ImageOps.mirror(image), 95),
    "all together, random": any_copy,
    "all together, hardest": hardest_copy,
}
# Where the search ends: people ask for these, and should know how often they are found.
CHANGES: dict[str, Callable[[Picture], Picture]] = {
    "grey": lambda image: image.convert("L"),
    "contrast x 0.7": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
    "brightness x 1.3": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "centre crop of 99 %": partial(cropped, share=0.99),
    "centre crop of 98 %": partial(cropped, share=0.98),
    "centre crop of 97 %": partial(cropped, share=0.97),
    "centre crop of 95 %": partial(cropped, share=0.95),
    "centre crop of 80 %": partial(cropped, share=0.8),
}


def compared_copies(job: tuple[int, bytes]) -> np.ndarray:
    """Which copies of an image match it."""
    number, content = job
    # By the number, not by one stream: the processes share the images out as they are free.
    rng = random.Random(number)
    with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
        image = opened.convert("RGB")
    copies = [manipulate(image, rng) for manipulate in PROMISED.values()]
    copies += [jpeg(change(image), 90) for change in CHANGES.values()]

    # Each copy alone with its image, else it could match another copy instead.
    descriptors, _ = describe_images([content, *copies])
    caught = []
    for i, copy in enumerate(copies, start=1):
        nearest = nearest_similar(descriptors[[0, i]])
        is_likely = nearest[1] == 0
        caught.append(is_likely and likeness(content, copy) > 0)
    return np.array(caught)


def report_catch_rates(images: dict[str, bytes]) -> None:
    """Images with too little contrast to compare count as missed."""
    num_cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(num_cores) as pool:
        jobs = enumerate(images.values())
        caught = np.stack(pool.map(compared_copies, jobs, chunksize=8))

    # Processor time, of one process: what a core does for a corpus, however busy the others are.
    start = time.process_time()
    descriptors, _ = describe_images(list(images.values()))
    rate = len(images) / (time.process_time() - start)

    num_flat = (~has_contrast(descriptors)).sum()
    print(f"{len(images)} images, {num_flat} with too little contrast to compare")
    print(f"described: {rate:.0f} images per second of processor time\n")
    for column, name in enumerate([*PROMISED, *CHANGES]):
        num_caught = int(caught[:, column].sum())
        low, high = wilson(num_caught, len(caught))
        note = "" if name in PROMISED else "   not promised"
        share = num_caught / len(caught)
        print(f"{name:34}{share:>10.2%} ({low:.1%} to {high:.1%}){note}")


def wilson(num: int, total: int) -> tuple[float, float]:
    """95 % interval of a rate of `num` in `total` (Wilson 1927, J. Am. Stat. Assoc. 22)."""
    rate = num / total
    z2 = WILSON_Z**2
    shrink = 1 + z2 / total
    middle = (rate + z2 / (2 * total)) / shrink
    variance = rate * (1 - rate) / total
    half = WILSON_Z * np.sqrt(variance + z2 / (4 * total**2)) / shrink
    # Rounding could take an end past 0 or 1, for example of 400 in 400.
    return max(0.0, middle - half), min(1.0, middle + half)


def report_false_positives(images: dict[str, bytes], folders: list[Path]) -> None:
    print(f"\n{'taken for copies':34}{'images':>8}{'copies':>8}")
    # Digits are the hard case: many different pictures of the same few strokes.
    sets = {"images": images, "handwritten digits": digits()}
    for folder in folders:
        sets[folder.name] = read_images(folder)

    for name, contents in sets.items():
        rows = search_shards(contents)
        copies = [row for row in rows if not row["keep"]]
        low, high = wilson(len(copies), max(len(rows), 1))
        print(f"{name:34}{len(rows):>8}{len(copies):>8}   {low:.1%} to {high:.1%}")
        for row in copies[:NUM_EXAMPLES]:
            print(f"    {row['path']} like {row['copy_of']}")


def search_shards(contents: dict[str, bytes]) -> list[dict[str, object]]:
    """Make shards of the images without labels; a row for each image, as the command gives it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "images")
        shards = Path(folder, "shards")
        source.mkdir()
        for name, content in contents.items():
            (source / name).write_bytes(content)

        # The whole command, since its thresholds and its second look are what users meet.
        root = Path(__file__).resolve().parents[1]
        make_shards = [
            root / "data_prep/make_shards.py",
            "--config",
            root / "configs/data/image_folder.yaml",
            f"source.path={source}",
            f"output={shards}",
            "labels.values=none",
        ]
        find = [root / "data_prep/find_duplicates.py", shards, "--similar"]
        for command in (make_shards, find):
            subprocess.run(
                [sys.executable, *command],
                check=True,
                stdout=subprocess.DEVNULL,
            )

        table = pq.read_table(Path(folder, "shards-duplicates", "duplicates.parquet"))
        rows: list[dict[str, object]] = table.to_pylist()
        return rows


def digits() -> dict[str, bytes]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        print("digits: left out, scikit-learn is not installed")
        return {}
    # scikit-learn's pixels are 0 to 16, in pictures of 8 x 8.
    grey_values = np.rint(load_digits().images * (255 / 16))
    images = {}
    for number, pixels in enumerate(grey_values.astype(np.uint8)):
        small = Image.fromarray(pixels)
        # The side of the smallest pictures that are compared as they are.
        image = small.resize((32, 32), Image.Resampling.BICUBIC)
        images[f"{number}.png"] = encoded(image, "PNG")
    return images


def random_descriptors(num: int, *, seed: int) -> np.ndarray:
    """Descriptors with the spectrum of photographs: amplitude falls with the frequency."""
    rng = np.random.default_rng(seed)
    amplitudes = 2000 / np.sqrt(1 + np.arange(NUM_FREQUENCIES))
    descriptors = np.empty((num, NUM_FREQUENCIES), np.int16)
    for start in range(0, num, BATCH_ROWS):
        rows = descriptors[start : start + BATCH_ROWS]
        # Coefficients of photographs have heavy tails, as this distribution has.
        coefficients = rng.laplace(size=rows.shape) * amplitudes
        # Inside int16, where a larger one would change its sign.
        rows[:] = np.rint(coefficients).clip(-30000, 30000)
    return descriptors


def report_search(num: int) -> None:
    """Search `num` descriptors, of which 2 % are copies, and print time and memory."""
    descriptors = random_descriptors(num, seed=0)
    num_planted = num // 100
    originals = descriptors[:num_planted]
    # One per cent are equal, which a hash finds; one per cent differ a little, far away from them.
    descriptors[num - num_planted :] = originals
    middle = num // 2
    descriptors[middle : middle + num_planted] = originals + np.int16(3)

    before = peak_mib()
    start = time.perf_counter()
    nearest = nearest_similar(descriptors)
    seconds = time.perf_counter() - start
    peak = peak_mib()

    num_copies = (nearest != np.arange(num)).sum()
    print(
        f"{num} images, {num_copies} copies, {seconds:.1f} s, "
        f"peak memory {peak:.0f} MiB ({before:.0f} before)",
        flush=True,
    )


def peak_mib() -> float:
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_script(main)
