"""List the members of an uncompressed tar, and notice a tar that is cut or damaged.

Leaves out: what members mean (`sources`, `verification`).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from vitscale.config.errors import UserError

BLOCK = tarfile.BLOCKSIZE
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class TarDefect(ValueError):
    """The tar is cut or damaged after the members listed so far."""


class Member(NamedTuple):
    name: str
    offset: int
    """First byte of the content in the file."""
    num_bytes: int
    is_file: bool
    """A regular file without holes."""
    is_folder: bool


def members(file: BinaryIO, *, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """Yield the members of the tar in bytes `start` to `end` of a file.

    The file may be read elsewhere between two members. Memory does not grow with their number.
    Raises TarDefect after the last whole member, UserError if it is compressed, and OSError.
    """
    end = file.seek(0, io.SEEK_END) if end is None else end
    file.seek(start)
    first = file.read(6)
    for mark, method in COMPRESSED.items():
        if first.startswith(mark):
            place = f"{file.name} (byte {start})" if start else file.name
            raise compressed_tar_error(place, method)
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (info := tar.next()) is not None:
                untyped: Any = tar
                untyped.members = []  # else all of them stay in memory
                if info.isreg() and info.offset_data + info.size > end or info.offset >= end:
                    raise TarDefect("ends inside a member")
                yield Member(
                    info.name,
                    info.offset_data,
                    info.size,
                    is_file=info.isreg() and info.sparse is None,
                    is_folder=info.isdir(),
                )
            # Python takes a cut tar, and a damaged header, for the end.
            file.seek(tar.offset)
            if tar.offset >= end or file.read(2 * BLOCK) != bytes(2 * BLOCK):
                raise TarDefect("no end mark after its last member: cut or damaged")
    except (tarfile.TarError, ArithmeticError, EOFError) as error:
        raise TarDefect(str(error)) from None


def compressed_tar_error(path: str, method: str) -> UserError:
    return UserError(
        f"{path!r} is compressed with {method}: its images cannot be read one by one",
        where="source.path",
        allowed="plain tar files",
        next_step="uncompress it first (gunzip, unxz, ...); its size hardly changes",
    )
