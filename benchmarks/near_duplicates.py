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

WILSON_Z = 1.96
NUM_EXAMPLES = 4
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
FILTERS = (
    Image.Resampling.BILINEAR,
    Image.Resampling.BICUBIC,
    Image.Resampling.LANCZOS,
)
MAX_ASPECT_CHANGE = 0.05
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
        for size in arguments.scale:
            subprocess.run(
                [sys.executable, __file__, "--search", str(size)], check=True
            )
    elif arguments.images:
        images = read_images(arguments.images)
        report_catch_rates(images)
        report_false_positives(images, arguments.different)
    else:
        parser.error("--images or --scale is needed")


def read_images(folder: Path) -> dict[str, bytes]:
    """Name -> encoded image."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES
    )
    if not files:
        raise UserError("contains no images", where=f"{folder}")
    return {path.name: path.read_bytes() for path in files}


def encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(image: Image.Image, quality: int) -> bytes:
    return encoded(image, "JPEG", quality=quality)


def resized(image: Image.Image, scale: float, rng: random.Random) -> Image.Image:
    aspect = rng.uniform(1 - MAX_ASPECT_CHANGE, 1 + MAX_ASPECT_CHANGE)
    size = (
        max(1, round(image.width * scale * aspect)),
        max(1, round(image.height * scale)),
    )
    return image.resize(size, rng.choice(FILTERS))


def cropped(image: Image.Image, share: float) -> Image.Image:
    x, y = image.width * (1 - share) / 2, image.height * (1 - share) / 2
    return image.crop(
        (round(x), round(y), round(image.width - x), round(image.height - y))
    )


def any_copy(image: Image.Image, rng: random.Random) -> bytes:
    """Resized, mirrored or not, and encoded by chance."""
    image = resized(image, rng.uniform(0.4, 2), rng)
    image = ImageOps.mirror(image) if rng.random() < 0.5 else image
    quality = rng.randint(30, 95)
    return encoded(image, rng.choice(("JPEG", "WEBP")), quality=quality)


Manipulation = Callable[[Image.Image, random.Random], bytes]
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
    "all together, hardest": lambda image, rng: jpeg(
        resized(ImageOps.mirror(image), 0.4, rng), 30
    ),
}
NOT_PROMISED: dict[str, Manipulation] = {
    "grey": lambda image, rng: jpeg(image.convert("L"), 90),
    "contrast x 0.7": lambda image, rng: jpeg(
        ImageEnhance.Contrast(image).enhance(0.7), 90
    ),
    "brightness x 1.3": lambda image, rng: jpeg(
        ImageEnhance.Brightness(image).enhance(1.3), 90
    ),
    "centre crop of 99 %": lambda image, rng: jpeg(cropped(image, 0.99), 90),
    "centre crop of 98 %": lambda image, rng: jpeg(cropped(image, 0.98), 90),
    "centre crop of 97 %": lambda image, rng: jpeg(cropped(image, 0.97), 90),
    "centre crop of 95 %": lambda image, rng: jpeg(cropped(image, 0.95), 90),
    "centre crop of 80 %": lambda image, rng: jpeg(cropped(image, 0.8), 90),
}
MANIPULATIONS = PROMISED | NOT_PROMISED


def compared_copies(job: tuple[int, bytes]) -> np.ndarray:
    """Which copies of an image match it."""
    number, content = job
    rng = random.Random(number)
    with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
        image = opened.convert("RGB")
    copies = [manipulate(image, rng) for manipulate in MANIPULATIONS.values()]
    rows, _ = describe_images([content, *copies])
    caught = []
    for i, copy in enumerate(copies, start=1):
        is_likely = nearest_similar(rows[[0, i]])[1] == 0
        caught.append(is_likely and likeness(content, copy) > 0)
    return np.array(caught)


def report_catch_rates(images: dict[str, bytes]) -> None:
    """Images with too little contrast to compare count as missed."""
    with multiprocessing.get_context("spawn").Pool(
        len(os.sched_getaffinity(0))
    ) as pool:
        caught = np.stack(
            pool.map(compared_copies, enumerate(images.values()), chunksize=8)
        )
    start = time.process_time()
    descriptors, _ = describe_images(list(images.values()))
    rate = len(images) / (time.process_time() - start)
    flat = (~has_contrast(descriptors)).sum()
    print(f"{len(images)} images, {flat} with too little contrast to compare")
    print(f"described: {rate:.0f} images per second of processor time\n")
    for column, name in enumerate(MANIPULATIONS):
        low, high = wilson(int(caught[:, column].sum()), len(caught))
        cells = f"{caught[:, column].mean():>10.2%} ({low:.1%} to {high:.1%})"
        print(f"{name:34}{cells}{'' if name in PROMISED else '   not promised'}")


def wilson(num: int, total: int) -> tuple[float, float]:
    """95 % interval of a rate of `num` in `total` (Wilson 1927, J. Am. Stat. Assoc. 22)."""
    rate, z2 = num / total, WILSON_Z**2
    middle = (rate + z2 / (2 * total)) / (1 + z2 / total)
    half = np.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2))
    half *= WILSON_Z / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def report_false_positives(images: dict[str, bytes], folders: list[Path]) -> None:
    print(f"\n{'taken for copies':34}{'images':>8}{'copies':>8}")
    sets = {"images": images, "handwritten digits": digits()}
    for name, contents in (
        sets | {folder.name: read_images(folder) for folder in folders}
    ).items():
        rows = found_copies(contents)
        copies = [row for row in rows if not row["keep"]]
        low, high = wilson(len(copies), max(len(rows), 1))
        print(f"{name:34}{len(rows):>8}{len(copies):>8}   {low:.1%} to {high:.1%}")
        for row in copies[:NUM_EXAMPLES]:
            print(f"    {row['path']} like {row['copy_of']}")


def found_copies(contents: dict[str, bytes]) -> list[dict[str, object]]:
    """Make shards of the images without labels, and return what is found in them."""
    scripts = Path(__file__).resolve().parents[1] / "data_prep"
    with tempfile.TemporaryDirectory() as folder:
        source, shards = Path(folder, "images"), Path(folder, "shards")
        source.mkdir()
        for name, content in contents.items():
            (source / name).write_bytes(content)
        make = [
            scripts / "make_shards.py",
            "--config",
            scripts.parent / "configs/data/image_folder.yaml",
        ]
        settings = [f"source.path={source}", f"output={shards}", "labels.values=none"]
        for command in (
            [*make, *settings],
            [scripts / "find_duplicates.py", shards, "--similar"],
        ):
            subprocess.run(
                [sys.executable, *command], check=True, stdout=subprocess.DEVNULL
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
    pictures = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    return {
        f"{number}.png": encoded(
            Image.fromarray(picture).resize((32, 32), Image.Resampling.BICUBIC), "PNG"
        )
        for number, picture in enumerate(pictures)
    }


def random_descriptors(num: int, *, seed: int) -> np.ndarray:
    """Descriptors with the spectrum of photographs: amplitude falls with the frequency."""
    rng = np.random.default_rng(seed)
    falling = 1 / np.sqrt(1 + np.arange(NUM_FREQUENCIES))
    parts = [
        np.rint(rng.laplace(size=(len(rows), NUM_FREQUENCIES)) * falling * 2000)
        .clip(-30000, 30000)
        .astype(np.int16)
        for rows in np.array_split(np.arange(num), -(-num // BATCH_ROWS))
    ]
    return np.concatenate(parts)


def report_search(num: int) -> None:
    """Search `num` descriptors, of which 2 % are copies, and print time and memory."""
    descriptors = random_descriptors(num, seed=0)
    share = num // 100
    descriptors[num - share :] = descriptors[:share]
    descriptors[num // 2 : num // 2 + share] = descriptors[:share] + np.int16(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    first = nearest_similar(descriptors)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{num} images, {(first != np.arange(num)).sum()} copies, {seconds:.1f} s, "
        f"peak memory {peak:.0f} MiB ({before:.0f} before)",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
