"""Map a function over worker processes.

Leaves out: work that several machines share (`data_prep.steps.work`).

Each worker has a pipe of its own and one item at a time, and this process alone waits, so there is
no lock and no thread that could miss a message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar

from vitscale.config.errors import UserError, WorkerError
from vitscale.distributed.fork_server import end_with_server, start_worker

Item = TypeVar("Item")


class Workers(ExitStack):
    """Processes that apply a function, which is pickled once; killed at the end of the block."""

    def __init__(
        self, function: Callable[[Any], Any], *, num: int, imports: Sequence[str]
    ) -> None:
        """num: 1 works in this process.

        imports: modules that the function needs; none of them may be the main script.
        """
        super().__init__()
        self.num = num
        self._function = function
        self._pipes = list[Connection]()
        # One worker would only add the cost of its pipe.
        if num == 1:
            return

        for _ in range(num):
            ours, theirs = Pipe()
            # With `theirs` closed here, the death of a worker ends the pipe.
            with _deaths_named(), theirs:
                process = start_worker(_work, (theirs, function), imports=imports)
            self.callback(process.kill)  # it may wait for dead storage
            self._pipes.append(ours)

    def results(self, items: Iterable[Item]) -> Iterator[tuple[int, Item, Any]]:
        """Yield (position, item, result) as they are done.

        Raises what the function raises, and WorkerError if one dies.
        """
        if not self._pipes:
            for number, item in enumerate(items):
                yield number, item, self._function(item)
            return

        idle = [*self._pipes]
        busy = dict[Connection, tuple[int, Item]]()
        numbered = enumerate(items)
        while True:
            # One item per idle worker: a slow item then keeps no others waiting behind it.
            for number, item in islice(numbered, len(idle)):
                worker = idle.pop()
                with _deaths_named():
                    worker.send(item)
                busy[worker] = number, item
            if not busy:
                return
            for ready in wait([*busy]):
                assert isinstance(ready, Connection)
                with _deaths_named():
                    result, error = ready.recv()
                if error is not None:
                    raise error
                idle.append(ready)
                yield *busy.pop(ready), result


@contextmanager
def _deaths_named() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise WorkerError(
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
                # Errors for users speak for themselves; others need the traceback of their process.
                if not isinstance(error, UserError):
                    error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                reply = None, error
            connection.send(reply)
