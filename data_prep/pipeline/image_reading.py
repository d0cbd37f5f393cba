"""Read and validate inputs.

Owns: files that are unreadable or too large to read, and validation in threads on idle cores.
Leaves out: validating bytes (`images.check`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data_prep.images.check import MAX_FILE_BYTES, ValidationResult, validate_image
from data_prep.pipeline.workspace import InputLocation, Preparation
from data_prep.sources.outages import raise_if_outage

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_THREADS = 32


def validate_input(p: Preparation, location: InputLocation) -> ValidationResult:
    """Validate one input. Its hash is empty if its bytes were not read.

    Raises UserError if the source has changed since it was listed, Interrupted for an outage,
    SpoolError if the spooled copy cannot be read.
    """
    if location.num_bytes > MAX_FILE_BYTES:
        return ValidationResult("too_large", b"", b"", b"")
    try:
        data = p.read(location)
    except OSError as error:
        raise_if_outage(error, os.fsdecode(location.path))
        return ValidationResult("unreadable", b"", b"", b"")
    return validate_image(data, settings=p.run.images)


def thread_results(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_threads: Callable[[], int]
) -> Iterator[Result]:
    """Yield results in the order of the items, with few items pending at a time.

    Decoders release the interpreter's lock, so threads decode in parallel. `num_threads` is called
    for every item: a process that works on the last unit uses the cores of idle processes.
    """
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        try:
            for item in items:
                wanted = min(num_threads(), MAX_THREADS)
                if wanted == 1 and not pending:
                    yield function(item)
                    continue
                pending.append(pool.submit(function, item))
                while len(pending) > (wanted if wanted > 1 else 0):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
