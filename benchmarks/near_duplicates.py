"""Measure the search for duplicates: catch rates, false positives and cost.

    python benchmarks/near_duplicates.py [--images FOLDER] [--held-out FOLDER] [--different FOLDER]
    python benchmarks/near_duplicates.py --scale 100000 1000000  time and memory of the grouping

Copies are made of each image and compared with it as a pair. Thresholds were chosen on the first
set, the tuning set, and on the first drawn pictures that look alike; the second set is held out.
Without folders, both are generated. Intervals are Wilson's, at 95 %, over images.
False positives: every pair of different images of both sets, of each folder of --different, and of
scikit-learn's handwritten digits. Catch rates assume that a pair is compared: the search for pairs
finds all that match (tests/unit/data_prep/duplicates/test_search.py).
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    import numpy as np
    from PIL import Image, ImageDraw, ImageEnhance, ImageOps

    from benchmarks.corpora.lookalikes import icon, inspection_picture
    from data_prep.duplicates.descriptors import (
        DESCRIPTOR,
        NUM_FREQUENCIES,
        are_duplicates,
        coefficient_descriptors,
        has_contrast,
        hashes_near,
        image_descriptor,
        image_descriptors,
    )
    from data_prep.duplicates.evaluation_sets import EvaluationIndex
    from data_prep.duplicates.search import find_duplicates
    from data_prep.duplicates.second_look import Look, look_at, nearly_equal
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

NUM_GENERATED = 400
HELD_OUT_SEED = 100_000
WILSON_Z = 1.96
NUM_EXAMPLES = 4
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
MAX_ASPECT_CHANGE = 0.05
PAIRS_AT_ONCE = 1 << 14
SURVEY_ROWS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the search for duplicates.")
    parser.add_argument("--images", type=Path, help="the tuning set; none: generated")
    parser.add_argument("--held-out", type=Path, help="other images; none: generated")
    parser.add_argument(
        "--different", type=Path, nargs="*", default=[], help="folders without copies"
    )
    parser.add_argument("--scale", type=int, nargs="+", metavar="N", help="group N descriptors")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        report_grouping(arguments.group)
    elif arguments.scale:
        report_scale(arguments.scale)
    else:
        sets = {
            "tuning": read_images(arguments.images, first_seed=0),
            "held out": read_images(arguments.held_out, first_seed=HELD_OUT_SEED),
        }
        report_catch_rates(sets)
        report_false_positives(sets, arguments.different)
        report_speed(sets["tuning"])


def read_images(folder: Path | None, *, first_seed: int = 0) -> dict[str, bytes]:
    """Name -> encoded image."""
    if folder is None:
        seeds = range(first_seed, first_seed + NUM_GENERATED)
        return {str(seed): encoded(generated(seed), "PNG") for seed in seeds}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError("contains no images", where=f"{folder}")
    return {path.name: path.read_bytes() for path in files}


def generated(seed: int) -> Image.Image:
    """Shapes, waves, smooth noise or rough noise."""
    rng = np.random.default_rng(seed)
    width, height = (int(side) for side in rng.integers(64, 257, 2))
    if seed % 4 == 0:
        image = Image.new("RGB", (width, height), tuple(rng.integers(0, 256, 3).tolist()))
        draw = ImageDraw.Draw(image)
        for number in range(int(rng.integers(3, 8))):
            x, y, w, h = (rng.random(4) * (width, height, width / 2, height / 2)).tolist()
            shape = draw.ellipse if number % 2 else draw.rectangle
            shape((x, y, x + w + 4, y + h + 4), fill=tuple(rng.integers(0, 256, 3).tolist()))
        return image
    if seed % 4 == 1:
        y, x = np.mgrid[:height, :width] / 64
        angle, phase, pitch = rng.random(3) * (np.pi, 2 * np.pi, 3)
        wave = np.sin((np.cos(angle) * x + np.sin(angle) * y) * (1 + pitch) + phase) / 2 + 0.5
        first, second = rng.integers(0, 256, (2, 3))
        return Image.fromarray((first + (second - first) * wave[..., None]).astype(np.uint8))
    cells = int(rng.integers(3, 10)) if seed % 4 == 2 else 16
    noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(image: Image.Image, quality: int) -> bytes:
    return encoded(image, "JPEG", quality=quality)


def resized(image: Image.Image, scale: float, rng: random.Random) -> Image.Image:
    aspect = rng.uniform(1 - MAX_ASPECT_CHANGE, 1 + MAX_ASPECT_CHANGE)
    size = max(1, round(image.width * scale * aspect)), max(1, round(image.height * scale))
    return image.resize(size, rng.choice(FILTERS))


def cropped(image: Image.Image, share: float) -> Image.Image:
    x, y = image.width * (1 - share) / 2, image.height * (1 - share) / 2
    return image.crop((round(x), round(y), round(image.width - x), round(image.height - y)))


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
    "size x 0.4, aspect up to 5 %": lambda image, rng: jpeg(resized(image, 0.4, rng), 95),
    "size x 0.4-2, aspect up to 5 %": lambda image, rng: jpeg(
        resized(image, rng.uniform(0.4, 2), rng), 95
    ),
    "mirrored": lambda image, rng: jpeg(ImageOps.mirror(image), 95),
    "all together, random": any_copy,
    "all together, hardest": lambda image, rng: jpeg(resized(ImageOps.mirror(image), 0.4, rng), 30),
}
NOT_PROMISED: dict[str, Manipulation] = {
    "grey": lambda image, rng: jpeg(image.convert("L"), 90),
    "contrast x 0.7": lambda image, rng: jpeg(ImageEnhance.Contrast(image).enhance(0.7), 90),
    "brightness x 1.3": lambda image, rng: jpeg(ImageEnhance.Brightness(image).enhance(1.3), 90),
    "centre crop of 95 %": lambda image, rng: jpeg(cropped(image, 0.95), 90),
    "centre crop of 80 %": lambda image, rng: jpeg(cropped(image, 0.8), 90),
}
MANIPULATIONS = PROMISED | NOT_PROMISED


def compared_copies(job: tuple[int, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(which copies of an image are likely ones, which of these pass the second look)."""
    number, content = job
    rng = random.Random(number)
    with Image.open(io.BytesIO(content)) as opened:
        image = opened.convert("RGB")
    copies = [manipulate(image, rng) for manipulate in MANIPULATIONS.values()]
    rows = image_descriptors([content, *copies])
    likely = are_duplicates(np.repeat(rows[:1], len(copies)), rows[1:])
    original = look_at(content)
    pairs = zip(likely, copies, strict=True)
    return likely, np.array([ok and nearly_equal(original, look_at(c)) for ok, c in pairs])


def report_catch_rates(sets: dict[str, dict[str, bytes]]) -> None:
    """Images with too little contrast to compare count as missed."""
    results = []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for name, images in sets.items():
            jobs = pool.map(compared_copies, enumerate(images.values()), chunksize=8)
            results.append([np.stack(column) for column in zip(*jobs, strict=True)])
            flat = (~has_contrast(image_descriptors(list(images.values())))).sum()
            print(f"{name}: {len(images)} images, {flat} with too little contrast to compare")
    heads = "".join(f"{name:>30}{'likely':>10}" for name in sets)
    print(f"\n{'copies caught':34}{heads}")
    for column, name in enumerate(MANIPULATIONS):
        cells = ""
        for likely, caught in results:
            low, high = wilson(int(caught[:, column].sum()), len(caught))
            rate = f"{caught[:, column].mean():.2%} ({low:.1%} to {high:.1%})"
            cells += f"{rate:>30}{likely[:, column].mean():>10.2%}"
        print(f"{name:34}{cells}{'' if name in PROMISED else '   not promised'}")
    for name, (_, caught) in zip(sets, results, strict=True):
        missed = [
            n
            for n, row in zip(sets[name], caught[:, : len(PROMISED)], strict=True)
            if not row.all()
        ]
        print(f"{name}: {len(missed)} images of which a promised copy is missed: {missed[:8]}")


def wilson(num: int, total: int) -> tuple[float, float]:
    """95 % interval of a rate of `num` in `total` (Wilson 1927, J. Am. Stat. Assoc. 22)."""
    rate, z2 = num / total, WILSON_Z**2
    middle = (rate + z2 / (2 * total)) / (1 + z2 / total)
    half = np.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2))
    half *= WILSON_Z / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def matching_pairs(descriptors: np.ndarray) -> list[tuple[int, int]]:
    first, second = np.triu_indices(len(descriptors), 1)
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(first), PAIRS_AT_ONCE):
        a = descriptors[first[start : start + PAIRS_AT_ONCE]]
        b = descriptors[second[start : start + PAIRS_AT_ONCE]]
        likely = np.flatnonzero(
            hashes_near(a["phash"], b["phash"])
            | hashes_near(a["mirrored"], b["phash"])
            | hashes_near(a["phash"], b["mirrored"])
        )
        found = start + likely[are_duplicates(a[likely], b[likely])]
        pairs += zip(first[found].tolist(), second[found].tolist(), strict=True)
    return pairs


def report_false_positives(sets: dict[str, dict[str, bytes]], folders: list[Path]) -> None:
    print(
        f"\n{'dropped, though different':34}{'images':>8}{'pairs':>10}{'likely':>8}{'dropped':>9}"
    )
    for name, images in sets.items():
        report_dropped(f"images, {name}", images)
    for first, name in ((0, "tuning"), (HELD_OUT_SEED, "held out")):
        seeds = range(first, first + NUM_GENERATED)
        for kind, draw in (("grey inspection", inspection_picture), ("icons", icon)):
            drawn = {str(seed): encoded(draw(seed)[0], "PNG") for seed in seeds}
            report_dropped(f"{kind}, {name}", drawn)
    report_dropped("handwritten digits", digits())
    for folder in folders:
        report_dropped(folder.name, read_images(folder))


def report_dropped(name: str, images: dict[str, bytes]) -> None:
    """Images that match an earlier one: by descriptors alone, and after the second look."""
    names, contents = list(images), list(images.values())
    looks: dict[int, Look | None] = {}
    likely: set[int] = set()
    dropped: dict[int, int] = {}
    for a, b in matching_pairs(image_descriptors(contents)):
        likely.add(b)
        for one in {a, b} - looks.keys():
            looks[one] = look_at(contents[one])
        if b not in dropped and nearly_equal(looks[a], looks[b]):
            dropped[b] = a
    num = len(images)
    low, high = wilson(len(dropped), max(num, 1))
    print(
        f"{name:34}{num:>8}{num * (num - 1) // 2:>10}{len(likely):>8}{len(dropped):>9}   "
        f"{low:.1%} to {high:.1%}"
    )
    for b, a in list(dropped.items())[:NUM_EXAMPLES]:
        print(f"    {names[b]} like {names[a]}")


def digits() -> dict[str, bytes]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        print("digits: left out, scikit-learn is not installed")
        return {}
    pictures = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    return {
        str(number): encoded(
            Image.fromarray(picture).resize((32, 32), Image.Resampling.BICUBIC), "PNG"
        )
        for number, picture in enumerate(pictures)
    }


def report_speed(images: dict[str, bytes]) -> None:
    start = time.process_time()
    for content in images.values():
        image_descriptor(content)
    rate = len(images) / (time.process_time() - start)
    print(f"\ndescribe: {rate:.0f} images per second of processor time")
    evaluation, corpus = random_descriptors(50_000, seed=0), random_descriptors(100_000, seed=1)
    corpus[:1000] = evaluation[:1000]
    index = EvaluationIndex(evaluation, tuple(map(str, range(len(evaluation)))))
    index.match(corpus[:1])
    start = time.process_time()
    found = index.match(corpus)
    seconds = time.process_time() - start
    assert np.array_equal(found[:1000], np.arange(1000))
    print(
        f"match: {len(corpus) / seconds:.0f} descriptors per second of processor time against "
        f"{len(evaluation)} evaluation images ({len(corpus) * len(evaluation) / seconds:.2e} "
        "pairs/s), "
        f"{(found[1000:] >= 0).sum()} found by chance"
    )


def random_descriptors(num: int, *, seed: int) -> np.ndarray:
    """Descriptors with the spectrum of photographs: amplitude falls with the frequency."""
    rng = np.random.default_rng(seed)
    falling = 1 / np.sqrt(1 + np.arange(NUM_FREQUENCIES))
    parts = [
        coefficient_descriptors(
            (rng.laplace(size=(len(rows), NUM_FREQUENCIES)) * falling * 2000).clip(-30000, 30000)
        )
        for rows in np.array_split(np.arange(num), -(-num // SURVEY_ROWS))
    ]
    return np.concatenate(parts)


def report_scale(sizes: list[int]) -> None:
    for size in sizes:
        subprocess.run([sys.executable, __file__, "--group", str(size)], check=True)


def report_grouping(num: int) -> None:
    """Group `num` descriptors, of which 2 % are copies, and print time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write_survey(Path(folder), start, min(SURVEY_ROWS, num - start))
            for start in range(0, num, SURVEY_ROWS)
        ]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start, cpu_start = time.perf_counter(), time.process_time()
        leaving = find_duplicates(
            paths, similar=True, scratch=Path(folder), output=Path(folder, "leaving.arrow")
        )
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"find_duplicates: {num} images, {leaving} dropped, {seconds:.1f} s ({cpu:.1f} s of "
        f"processor time), peak memory "
        f"{peak:.0f} MiB ({before:.0f} before)",
        flush=True,
    )


def write_survey(folder: Path, start: int, num: int) -> Path:
    import pyarrow as pa

    descriptors = random_descriptors(num, seed=start)
    descriptors[num - num // 100 :] = descriptors[: num // 100]
    coefficients = descriptors["coefficients"][: num // 100] + np.int16(3)
    descriptors[num // 2 : num // 2 + num // 100] = coefficient_descriptors(coefficients)
    hashes = np.random.default_rng(start).bytes(32 * num)
    columns = {
        "rank": pa.array(np.arange(start, start + num, dtype=np.uint64)),
        "content_hash": fixed(hashes, 32),
        "descriptor": fixed(descriptors.tobytes(), DESCRIPTOR.itemsize),
    }
    table = pa.table(columns)
    path = folder / f"{start:09d}.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def fixed(data: bytes, width: int) -> Any:
    import pyarrow as pa

    num = len(data) // width
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), num, [None, pa.py_buffer(data)])


if __name__ == "__main__":
    run_script(main)
