"""Judging many files in parallel (superseded by `image_check.judge_image`).

Owns: the judgement of one file by its content, and the pool that judges many.
Leaves out: which files exist (`image_folder`) and what becomes of them (`input_ledger`).
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait

from PIL import Image

from vitscale.errors import UserError

# Pillow's names -> extensions of tar members. MPO: JPEGs of some phones, with a second picture
# behind the first; every JPEG decoder shows the first.
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
# Values beyond 8 bits a channel in one grey channel: converting to RGB would clip nearly all of
# them to white.
DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
# A bound on memory per worker; the largest ImageNet-21k image has far less.
MAX_FILE_BYTES = 1 << 29
BATCH_FILES = 32
BATCHES_IN_FLIGHT_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What one file is. `reason` is None for a usable image, otherwise a key of REASONS."""

    reason: str | None
    sha256: bytes | None = None
    num_bytes: int = 0
    extension: str = ""
    width: int = 0
    height: int = 0


def check_image(path: str, *, max_pixels: int) -> ImageFacts:
    """Judge a file by content: format, pixels claimed by the header, then a full decode."""
    try:
        if os.stat(path).st_size > MAX_FILE_BYTES:
            return ImageFacts("too_large")
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return ImageFacts("unreadable")
    if not data:
        return ImageFacts("empty", hashlib.sha256(data).digest())
    return check_image_bytes(data, max_pixels=max_pixels)


def check_image_bytes(data: bytes, *, max_pixels: int) -> ImageFacts:
    sha256 = hashlib.sha256(data).digest()
    # The run's own limit below takes the place of Pillow's.
    Image.MAX_IMAGE_PIXELS = None
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    except Image.UnidentifiedImageError:
        return ImageFacts("not_an_image", sha256, len(data))
    except Exception:
        # Pillow raises SyntaxError, ValueError, struct.error, zlib.error ... on broken headers.
        return ImageFacts("bad_header", sha256, len(data))
    width, height = image.size
    facts = (sha256, len(data), EXTENSIONS[image.format or ""], width, height)
    if width * height > max_pixels:
        return ImageFacts("too_many_pixels", *facts)
    if image.mode in DEEP_MODES:
        return ImageFacts("deep_grey", *facts)
    try:
        image.load()
    except Exception:
        return ImageFacts("bad_pixels", *facts)
    return ImageFacts(None, *facts)


def check_images(
    paths: Sequence[str], *, max_pixels: int, advance: Callable[[int], None]
) -> list[ImageFacts]:
    """Judge files in parallel; results in the order of `paths`. `advance` gets counts done."""
    facts: list[ImageFacts] = []
    num_batches = -(-len(paths) // BATCH_FILES)
    workers = max(1, min(len(os.sched_getaffinity(0)), num_batches))
    # Fresh processes: a fork next to the progress bar's thread can inherit a held lock.
    context = multiprocessing.get_context("spawn")
    batches = iter(_batches(paths))
    pending: deque[tuple[list[str], Future[list[ImageFacts]]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for batch in batches:
                pending.append((batch, pool.submit(_check_batch, batch, max_pixels)))
                if len(pending) >= workers * BATCHES_IN_FLIGHT_PER_WORKER:
                    facts += _take(pending, advance)
            while pending:
                facts += _take(pending, advance)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return facts


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(paths), BATCH_FILES):
        yield list(paths[start : start + BATCH_FILES])


def _take(
    pending: deque[tuple[list[str], Future[list[ImageFacts]]]], advance: Callable[[int], None]
) -> list[ImageFacts]:
    batch, future = pending.popleft()
    try:
        result = future.result()
    except BrokenProcessPool:
        raise UserError(
            f"a process that decoded images died; it was near {batch[0]!r} "
            f"(the next {BATCH_FILES * BATCHES_IN_FLIGHT_PER_WORKER} files by name)",
            next_step="look for 'out of memory' in the system log; lower images.max_pixels",
        ) from None
    advance(len(batch))
    return result


def _check_batch(paths: list[str], max_pixels: int) -> list[ImageFacts]:
    return [check_image(path, max_pixels=max_pixels) for path in paths]


def _end_with_parent() -> None:
    """Leave when the parent is killed: the pool's own pipes never report that."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
