"""Marks of progress that the loop of a rank makes, and its device reaches later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Event(Protocol):
    """A point in the work of a device, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has reached it. Does not wait."""
        ...


class _Reached:
    """On CPU, where work is done when its call returns."""

    def query(self) -> bool:
        return True


def recorder(device: torch.device) -> Callable[[], Event]:
    """Mark the present point in the work of a device."""
    if device.type == "cuda":
        return lambda: torch.cuda.current_stream().record_event()
    return _Reached


class Marks:
    """The marks of one rank; `add` is called by its loop, `reached` by one other thread."""

    def __init__(self, record: Callable[[], Event]) -> None:
        self.record, self._num = record, 0
        self._ahead: deque[tuple[int, str, Event]] = deque()
        self._last = 0, "starting"

    def add(self, doing: str) -> None:
        self._num += 1
        self._ahead.append((self._num, doing, self.record()))

    def reached(self) -> tuple[int, str]:
        """The number of the last mark that the device has reached, and what it does since."""
        with suppress(RuntimeError):  # the device has failed, and with it the loop
            while self._ahead and self._ahead[0][2].query():
                number, doing, _ = self._ahead.popleft()
                self._last = number, doing
        return self._last


def collectives_begun() -> int:
    """How many collectives this process has begun, over all groups; 0 where torch does not say."""
    with suppress(AttributeError, RuntimeError):
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0
