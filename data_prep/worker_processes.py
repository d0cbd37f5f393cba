"""Map a function over worker processes, in order.

Leaves out: work that several machines share (`steps.work`).

Each worker has a pipe of its own and one item at a time, and this process alone waits, so there is
no lock and no thread that could miss a message.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from vitscale.config.errors import UserError
from vitscale.distributed.fork_server import end_with_server, worker_context
from vitscale.distributed.processes import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
PENDING_PER_WORKER = 2
# Reading less than this takes no longer than starting processes.
SMALL_BYTES = 256 << 20


def workers_for(num_bytes: int, *, num_workers: int | None) -> int | None:
    """`num_workers`; where it is None, 1 for inputs too small to be worth starting processes."""
    return 1 if num_workers is None and num_bytes < SMALL_BYTES else num_workers


def ordered_results(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int | None
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, result) in the order of the items, with at most a few items pending.

    num_workers: None for one per core; 1 works in this process. `function` and items are pickled;
    neither may come from the main script.
    """
    num_workers = num_workers or num_cores()
    items = iter(items)
    first = list(islice(items, 2))
    items = chain(first, items)
    if num_workers == 1 or len(first) < 2:
        for item in items:
            yield item, function(item)
        return
    module = getattr(function, "func", function).__module__  # of a partial: of what it calls
    context = worker_context([module])
    pipes = [context.Pipe() for _ in range(num_workers)]
    workers = [
        context.Process(target=_work, args=(theirs, function), daemon=True) for _, theirs in pipes
    ]
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            with _deaths_named():
                worker.start()
            theirs.close()
        yield from _ordered([ours for ours, _ in pipes], items)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()


def _ordered(workers: Sequence[Connection], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    numbered, idle, busy = enumerate(items), [*workers], dict[Connection, int]()
    pending, replies = deque[tuple[int, Item]](), dict[int, tuple[Result, Exception | None]]()
    while True:
        num_free = PENDING_PER_WORKER * len(workers) - len(pending)
        for number, item in islice(numbered, min(len(idle), num_free)):
            worker = idle.pop()
            with _deaths_named():
                worker.send(item)
            busy[worker] = number
            pending.append((number, item))
        if not pending:
            return
        number, item = pending[0]
        if number in replies:
            pending.popleft()
            result, error = replies.pop(number)
            if error is not None:
                raise error
            yield item, result
            continue
        for ready in wait([*busy]):
            assert isinstance(ready, Connection)
            with _deaths_named():
                replies[busy.pop(ready)] = ready.recv()
            idle.append(ready)


@contextmanager
def _deaths_named() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise UserError(
            "a worker process died, probably for lack of memory",
            where="num_workers",
            next_step="run the command again, with fewer workers if it recurs",
        ) from None


def _work(connection: Connection, function: Callable[[Any], Any]) -> None:
    end_with_server()
    reply: tuple[Any, Exception | None]
    with suppress(EOFError):  # nobody needs more
        while True:
            item = connection.recv()
            try:
                reply = function(item), None
            except Exception as error:
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                reply = None, error
            connection.send(reply)
