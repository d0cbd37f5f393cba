"""Write where a disk may be full, or fail for a while.

Owns: another attempt after some seconds; and what a run can do without: standard streams and logs
that lose lines instead of raising, and records whose loss is a warning. Needs no torch.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
# Errors of storage that often pass, and how long to wait before each further attempt.
PASSING = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EAGAIN)
PAUSES_S = (0.5, 1.0, 2.0)


def retried(work: Callable[[], T]) -> T:
    """The result of `work`, which is repeated after an error of PASSING. Raises OSError."""
    for pause_s in PAUSES_S:
        try:
            return work()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(pause_s)
    return work()


class _ForgivingFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            return memoryview(data).nbytes


def open_log(file: Path | int) -> TextIO:
    """Append lines to a file or descriptor; those that storage refuses are lost."""
    raw = _ForgivingFile(file, "a", closefd=isinstance(file, Path))
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def forgive_output() -> None:
    """Let standard output and errors that go to files lose lines when storage refuses them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(io.UnsupportedOperation):  # kept in memory
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, open_log(stream.fileno()))


@contextmanager
def or_warn(what: Path | str, say: Callable[[str], None]) -> Iterator[None]:
    """Say it when storage refuses what the block writes, which is then lost."""
    try:
        yield
    except OSError as error:
        say(f"warning: {what}: cannot be written ({error.strerror}); going on without it")
