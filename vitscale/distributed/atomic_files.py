"""Write files that are either whole or absent; try again, or do without, where storage fails.

A rename without the fsync before it can leave a file of zero bytes after power loss (seen on ext4),
hence the order: write, fsync, rename, fsync of the parent. https://lwn.net/Articles/457667/
Needs no torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import blake3

from vitscale.config.errors import PASSING, not_read, print_note

T = TypeVar("T")
Say = Callable[[str], None]
"""Prints a line, or keeps it."""
HASH_CHUNK_BYTES = 1 << 20
# How long to wait before each further attempt after an error that often passes.
PAUSES_S = (0.5, 1.0, 2.0)
# The same before a read of training data is repeated: longer, because a step waits for it, and a
# save may come later. No attempt begins after READ_PATIENCE_S, so that also where each one takes
# minutes the error comes before the loader gives up its worker.
READ_PAUSES_S = (0.5, 1.0, *[2.0] * 7)
READ_PATIENCE_S = 120.0


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that renames inside it survive power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents so that their names survive power loss."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        # From the top down: each name must be durable before something inside it is.
        each.mkdir(exist_ok=True)
        fsync_folder(each.parent)


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write and fsync a file that must not exist yet. Returns its bytes and its BLAKE3 hash.

    Pieces are taken one by one, as the disk accepts them. Hashed while it is written, without a
    second copy of the content; other threads can run.
    For files in a folder that is not committed yet: the file's name needs the fsync of its folder.
    Raises OSError that names the file.
    """
    digest = blake3.blake3()
    num_bytes = 0

    try:
        # Exclusive creation shows a file that an earlier attempt has left.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for piece in pieces:
                whole = memoryview(piece)
                num_bytes += len(whole)
                for start in range(0, len(whole), HASH_CHUNK_BYTES):
                    chunk = whole[start : start + HASH_CHUNK_BYTES]
                    digest.update(chunk)
                    # A system call may write less than it is given.
                    while chunk:
                        chunk = chunk[os.write(fd, chunk) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return num_bytes, digest.hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for bytes; rename it when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        # The name is random, so that two writers of the same path do not share a temporary file.
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself survives power loss only with the folder's entries.
    fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def json_text(value: Any) -> str:
    """JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def commit_folder(temporary: Path, final: Path) -> None:
    """Give a fully written (and per-file fsynced) folder its final name. `final` must not exist."""
    # The names inside come first: a committed folder must not turn up empty.
    fsync_folder(temporary)
    os.rename(temporary, final)
    fsync_folder(final.parent)


def blake3_of_file(path: Path | str, *, from_disk: bool = False) -> str:
    """Hexadecimal BLAKE3 of a file's bytes, as `b3sum` prints it.

    from_disk: drop what the page cache holds of the (fsynced) file first, where the system can.
    """
    digest = blake3.blake3()
    with open(path, "rb") as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def retried(
    work: Callable[[], T],
    *,
    name: Path | str | None = None,
    pauses_s: Sequence[float] | None = None,
    patience_s: float = math.inf,
) -> T:
    """The result of `work`, which is repeated after an error of PASSING. Raises OSError.

    name: of a file, for a line that says so from the second error on. pauses_s: before each further
    attempt; None: PAUSES_S. patience_s: no attempt begins later than this after the first.
    """
    if pauses_s is None:
        pauses_s = PAUSES_S
    start = time.monotonic()

    for number, pause_s in enumerate(pauses_s):
        try:
            return work()
        except OSError as error:
            # Errors such as a missing file do not pass, so they are raised at once.
            if error.errno not in PASSING or time.monotonic() - start > patience_s:
                raise
            if number == 1 and name is not None:
                print_note(f"{name}: {error.strerror}; reading it again")
        time.sleep(pause_s)
    return work()


def retried_read(work: Callable[[], T], *, name: Path | str) -> T:
    """The same for a read of training data, which is repeated for longer.

    Raises StorageError for an error that has not passed, and OSError for any other.
    """
    try:
        return retried(
            work, name=name, pauses_s=READ_PAUSES_S, patience_s=READ_PATIENCE_S
        )
    except OSError as error:
        if error.errno not in PASSING:
            raise
        step = "check the storage, then run the same command again"
        raise not_read(error, name, next_step=step) from None


class _ForgivingFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            # Reported as written, or the buffer would offer the same bytes again at every line.
            return memoryview(data).nbytes


def open_log(file: Path | int) -> TextIO:
    """Append lines to a file or descriptor; those that storage refuses are lost."""
    raw = _ForgivingFile(file, "a", closefd=isinstance(file, Path))
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


@contextmanager
def or_warn(what: Path, say: Say) -> Iterator[None]:
    """Say it when storage refuses what the block writes, which is then lost."""
    try:
        yield
    except OSError as error:
        say(
            f"warning: {what}: cannot be written ({error.strerror}); going on without it"
        )
