"""List the members of a tar: the one reader of tars that others made, for indexes and for streams.

Owns: where a tar ends, what may follow its end mark, and headers that are damaged or hostile.
Leaves out: which members form a sample (`data_prep.sources.tars`, `webdataset`), and our own tars,
whose bytes are known (`vitscale.data.tar_writer`).

Python's tarfile parses the headers. It trusts their sizes: a negative one leads back, a huge one is
allocated. So it sees the file through `_Headers`, which reads forward and little at a time.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
END_MARK = bytes(2 * BLOCK)
# First bytes of gzip, bzip2, xz, zstd and lz4.
COMPRESSED = (
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
)
# A long name, or the PAX records of a member: paths have at most 4 KiB, attributes of files 64 KiB.
MAX_HEADER_BYTES = 1 << 20
# tarfile searches PAX records in quadratic time of their longest run of digits. A part of a path
# has at most 255 bytes.
TOO_MANY_DIGITS = re.compile(rb"[0-9]{256}")
ZEROS_AT_A_TIME = 1 << 20
# Errors that tarfile raises for headers that are no headers, besides its own.
DAMAGE = (
    tarfile.TarError,
    ArithmeticError,
    EOFError,
    LookupError,
    RecursionError,
    ValueError,
)


class TarDefect(ValueError):
    """A tar is cut or damaged after the members listed so far."""


class CompressedTar(TarDefect):
    """A tar is compressed, so its members have no place in the file."""


class Member(NamedTuple):
    name: str
    offset: int
    """First byte of the content in the file."""
    num_bytes: int
    is_file: bool
    """A regular file without holes."""
    is_folder: bool


def members(
    file: BinaryIO, *, start: int = 0, end: int | None = None
) -> Iterator[Member]:
    """Yield the members of the tar in bytes `start` to `end` of a file.

    Tars that were appended to it (`cat a.tar b.tar`) are read as well: only zeros may follow the
    last end mark. The file may be read elsewhere between two members. Memory does not grow with
    their number. Raises TarDefect after the last whole member, and OSError.
    """
    end = file.seek(0, io.SEEK_END) if end is None else end
    file.seek(start)
    if file.read(6).startswith(COMPRESSED):
        raise CompressedTar("it is compressed")

    position: int | None = start
    while position is not None:
        mark = yield from _one_archive(file, position, end)

        # Bytes behind an end mark that begin with no header are no second archive.
        if mark == position > start:
            raise TarDefect("the bytes behind its end mark are no tar")
        file.seek(mark)
        if file.read(max(0, min(len(END_MARK), end - mark))) != END_MARK:
            raise TarDefect("no end mark after its last member: cut or damaged")
        position = _behind_zeros(file, mark, end)


def _one_archive(file: BinaryIO, start: int, end: int) -> Generator[Member, None, int]:
    """Yield the members up to what is no header; return its place. Raises TarDefect."""
    headers: Any = _Headers(file, start, end)
    try:
        with tarfile.open(fileobj=headers, mode="r:") as tar:
            while (info := tar.next()) is not None:
                untyped: Any = tar
                untyped.members = []  # else all of them stay in memory
                # Python 3.11 follows a negative size back, for ever.
                if info.size < 0 or tar.offset <= info.offset:
                    raise TarDefect("a member has a negative size")
                # `size` of a file with holes counts them, though they are not stored.
                has_holes = info.sparse is not None
                content_end = tar.offset if has_holes else info.offset_data + info.size
                if info.isreg() and content_end > end or info.offset >= end:
                    raise TarDefect("ends inside a member")

                yield Member(
                    info.name,
                    info.offset_data,
                    info.size,
                    is_file=info.isreg() and not has_holes,
                    is_folder=info.isdir(),
                )
            return tar.offset
    except TarDefect:
        raise
    except DAMAGE as error:
        raise TarDefect(str(error)) from None


def _behind_zeros(file: BinaryIO, position: int, end: int) -> int | None:
    """Return the first block from `position` on that is not all zeros; None: there is none."""
    while position < end:
        file.seek(position)
        data = file.read(min(ZEROS_AT_A_TIME, end - position))
        if not data:
            raise TarDefect("it became shorter while it was read")
        # The next archive begins at a block, so the position is rounded down to one.
        if data.count(0) < len(data):
            num_zeros = len(data) - len(data.lstrip(b"\0"))
            return position + num_zeros // BLOCK * BLOCK
        position += len(data)
    return None


class _Headers:
    """The part of a file that tarfile may read: from `start` to `end`, little at a time."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file = file
        self._position = start
        self._end = end

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, num_bytes: int) -> bytes:
        """Return bytes of a header. Raises TarDefect for a size that no header has."""
        if not 0 <= num_bytes <= MAX_HEADER_BYTES:
            raise TarDefect(f"a header claims {num_bytes:,} bytes")
        self._file.seek(self._position)

        # The end of this range may come before that of the file, as inside a larger tar.
        data = self._file.read(max(0, min(num_bytes, self._end - self._position)))
        if len(data) > BLOCK and TOO_MANY_DIGITS.search(data):
            raise TarDefect("a header has a number of more than 255 digits")
        self._position += len(data)
        return data
