"""Measure the search for duplicates: catch rates, false positives and cost.

    python benchmarks/near_duplicates.py [--images FOLDER]       catch rates, false positives, speed
    python benchmarks/near_duplicates.py --scale 100000 1000000  time and memory of the grouping

Copies are made of each image of FOLDER (JPEG, PNG, WebP, any structure) or of generated pictures,
and compared as a pair. Two halves of the images are reported, to show how much the rates vary.
False positives: every pair of different images of FOLDER, and of scikit-learn's handwritten digits,
of which many look alike. Catch rates assume that a pair is compared: the search for pairs finds all
that match (tests/unit/data_prep/duplicates/test_search.py).
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
    from data_prep.duplicates.second_look import look_at, nearly_equal
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

NUM_GENERATED = 400
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
MAX_ASPECT_CHANGE = 0.05
PAIRS_AT_ONCE = 1 << 14
SURVEY_ROWS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the search for duplicates.")
    parser.add_argument("--images", type=Path, help="folder of distinct images; none: generated")
    parser.add_argument("--scale", type=int, nargs="+", metavar="N", help="group N descriptors")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        report_grouping(arguments.group)
    elif arguments.scale:
        report_scale(arguments.scale)
    else:
        images = read_images(arguments.images)
        originals = report_catch_rates(images)
        print(f"\n{'matched by mistake':34}{'pairs':>10}{'found':>10}")
        report_false_positives("images above", originals)
        report_digits()
        report_lookalikes()
        report_speed(images)


def read_images(folder: Path | None) -> list[bytes]:
    if folder is None:
        return [encoded(generated(seed), "PNG") for seed in range(NUM_GENERATED)]
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError("contains no images", where=f"--images {folder}")
    return [path.read_bytes() for path in files]


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


def compared_copies(job: tuple[int, bytes]) -> tuple[np.void, np.ndarray, np.ndarray]:
    """(descriptor of an image, which copies it matches, which of these the second look keeps)."""
    number, content = job
    rng = random.Random(number)
    with Image.open(io.BytesIO(content)) as opened:
        image = opened.convert("RGB")
    copies = [manipulate(image, rng) for manipulate in MANIPULATIONS.values()]
    rows = image_descriptors([content, *copies])
    likely = are_duplicates(np.repeat(rows[:1], len(copies)), rows[1:])
    original = look_at(content)
    pairs = zip(likely, copies, strict=True)
    return rows[0], likely, np.array([ok and nearly_equal(original, look_at(c)) for ok, c in pairs])


def report_catch_rates(images: list[bytes]) -> np.ndarray:
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        jobs = pool.map(compared_copies, enumerate(images), chunksize=8)
    originals, likely, caught = (np.stack(column) for column in zip(*jobs, strict=True))
    comparable = has_contrast(originals)
    print(
        f"{len(images)} images, {(~comparable).sum()} of them with too little contrast to compare"
    )
    print(f"\n{'copies caught':34}{'half 1':>10}{'half 2':>10}{'likely':>10}")
    # In fours, since generated pictures are of four kinds in turn.
    first = np.arange(len(images)) // 4 % 2 == 0
    for column, name in enumerate(MANIPULATIONS):
        rates = [caught[comparable & half, column].mean() for half in (first, ~first)]
        found = likely[comparable, column].mean()
        note = "" if name in PROMISED else "   not promised"
        print(f"{name:34}{rates[0]:>10.2%}{rates[1]:>10.2%}{found:>10.2%}{note}")
    return originals


def false_pairs(descriptors: np.ndarray) -> tuple[int, int, int]:
    """(pairs of different images, those that match, images in these)."""
    pairs = matching_pairs(descriptors)
    num = len(descriptors)
    return num * (num - 1) // 2, len(pairs), len({b for _, b in pairs})


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


def report_false_positives(name: str, descriptors: np.ndarray) -> None:
    pairs, found, leaving = false_pairs(descriptors)
    print(
        f"{name:34}{pairs:>10}{found:>10}   {leaving} of {len(descriptors)} images would be dropped"
    )


def report_digits() -> None:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        print("digits: left out, scikit-learn is not installed")
        return
    pictures = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    contents = [
        encoded(Image.fromarray(picture).resize((32, 32), Image.Resampling.BICUBIC), "PNG")
        for picture in pictures
    ]
    report_false_positives("handwritten digits", image_descriptors(contents))


def report_lookalikes() -> None:
    """What is taken of corpora that look alike at 32 x 32 pixels, and after the second look."""
    print(f"\n{'images taken':34}{'likely':>10}{'dropped':>10}{'of these, labels differ':>26}")
    for name, draw in (("grey inspection pictures", inspection_picture), ("icons", icon)):
        drawn = [draw(seed) for seed in range(NUM_GENERATED)]
        contents = [encoded(image, "PNG") for image, _ in drawn]
        labels = [label for _, label in drawn]
        looks, likely = [look_at(content) for content in contents], set()
        dropped, differ = set(), set()
        for a, b in matching_pairs(image_descriptors(contents)):
            likely.add(b)
            if b not in dropped and nearly_equal(looks[a], looks[b]):
                dropped.add(b)
                differ |= {b} if labels[a] != labels[b] else set()
        shares = (f"{len(found) / NUM_GENERATED:>10.1%}" for found in (likely, dropped))
        print(f"{name:34}{''.join(shares)}{len(differ):>26}")


def report_speed(images: list[bytes]) -> None:
    start = time.process_time()
    for content in images:
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
