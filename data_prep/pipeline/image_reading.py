"""From a place in the source to a verdict: read, then judge.

Owns: files that cannot be read, or are too large to read; judging on cores that would be idle.
Leaves out: the verdict on bytes (`image_check`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data_prep.images.check import ValidationResult, validate_image
from data_prep.pipeline.workspace import Place, Preparation
from data_prep.sources.outages import raise_if_outage
from vitscale.runs.data_prep import ImageSettings

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_THREADS = 32
Room = Callable[[int], memoryview]


def validate_place(
    p: Preparation, place: Place, *, settings: ImageSettings, room: Room | None = None
) -> ValidationResult:
    """Judge one input. Its hash is empty when its bytes were not read.

    room: where to read so many bytes to, valid until it is asked again.
    Raises UserError when the source changed since it was listed, Interrupted for an outage,
    SpoolError where our own copy of it cannot be read.
    """
    if place.num_bytes > settings.max_file_mib * 2**20:
        return ValidationResult("too_large", b"", b"", b"")
    try:
        data = p.read(place, into=None if room is None else room(place.num_bytes))
    except OSError as error:
        raise_if_outage(error, os.fsdecode(place.path))
        return ValidationResult("unreadable", b"", b"", b"")
    return validate_image(data, settings=settings)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_threads: Callable[[], int]
) -> Iterator[Result]:
    """Results in the order of the items, of which few are under way at a time.

    Decoding leaves the interpreter to others, so threads decode at once. Their number is asked for
    at every item: a process alone with the last unit takes the cores of those that have none.
    """
    under_way: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        try:
            for item in items:
                wanted = min(num_threads(), MAX_THREADS)
                if wanted == 1 and not under_way:
                    yield function(item)
                    continue
                under_way.append(pool.submit(function, item))
                while len(under_way) > (wanted if wanted > 1 else 0):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
