"""A function over many items on all cores, results in order, few items under way at a time.

Leaves out: work that several machines share (`work_units`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from vitscale.config.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
UNDER_WAY_PER_WORKER = 2
# Reading less than this takes no longer than starting processes.
SMALL_BYTES = 256 << 20


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def workers_for(num_bytes: int, *, num_workers: int | None) -> int | None:
    """The number asked for; where nothing was asked, one for little to read."""
    return 1 if num_workers is None and num_bytes < SMALL_BYTES else num_workers


def ordered_results(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int | None
) -> Iterator[tuple[Item, Result]]:
    """(item, result) in the order of the items, of which at most a few are held at a time.

    num_workers: None for one per core; 1 works in this process. `function` and items are pickled.
    """
    num_workers = num_workers or num_cores()
    items = iter(items)
    first = list(islice(items, 2))
    if num_workers == 1 or len(first) < 2:
        for item in (*first, *items):
            yield item, function(item)
        return
    # spawn: a fork would copy the locks of pyarrow's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        under_way: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in (*first, *items):
                under_way.append((item, pool.submit(function, item)))
                if len(under_way) >= UNDER_WAY_PER_WORKER * num_workers:
                    done, future = under_way.popleft()
                    yield done, future.result()
            while under_way:
                done, future = under_way.popleft()
                yield done, future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, most likely for lack of memory",
                where="num_workers",
                next_step="run the command again, with fewer workers if it happens again",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
