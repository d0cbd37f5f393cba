"""List the members of a tar without extracting them; only headers are read.

Owns: the parts of the tar format (ustar, GNU, pax) that locate the bytes of each member, in a file
or in a range of one (a tar inside a tar), and detecting truncation and damaged headers.
Leaves out: what members mean (`class_tars`, `webdataset_tars`).

Python's streaming reader treats truncation inside or before a header as the end. Here a tar is
complete only if all members are inside it and two blocks of zeros, then only zeros, follow.
Format: POSIX.1-2001 "pax", and the GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol
from zlib import adler32

BLOCK = 512
ZEROS = bytes(BLOCK)
MAX_LONG_NAME_BYTES = 65_536
MAX_PAX_BYTES = 1 << 20
# After the last member; tar itself pads to a multiple of 10 KiB, tapes to some MiB.
MAX_PADDING_BYTES = 64 << 20
SMALLEST_WINDOW, LARGEST_WINDOW = 2048, 1 << 18
COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}

MemberKind = Literal["file", "folder", "link", "special", "sparse"]
# Types without data; every other type has `size` bytes.
KIND_WITHOUT_DATA: dict[bytes, MemberKind] = {
    b"1": "link",
    b"2": "link",
    b"3": "special",
    b"4": "special",
    b"5": "folder",
    b"6": "special",
}


class TarDefect(ValueError):
    """The tar is truncated or damaged. Members yielded before are complete."""

    def __init__(self, what: str, *, offset: int) -> None:
        self.offset = offset
        super().__init__(f"{what} at byte {offset}")


class CompressedTar(TarDefect):
    """Compressed data instead of a tar: members have no offsets."""

    def __init__(self, method: str, *, offset: int) -> None:
        self.method = method
        super().__init__(f"compressed with {method}", offset=offset)


@dataclass(slots=True)
class TarMember:
    """One member; `offset` is the first byte of its data in the file."""

    name: str
    """As stored, unchecked; bytes that are not UTF-8 become surrogates."""
    offset: int
    num_bytes: int
    kind: MemberKind


@dataclass(slots=True)
class _Extension:
    """Content of extension headers, which apply to the next member."""

    long_name: bytes | None = None
    num_bytes: int | None = None
    is_sparse: bool = False


class RandomAccess(Protocol):
    """A file that is not local."""

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Like `os.pread`."""
        ...


# A file descriptor, or a file elsewhere.
TarFile = int | RandomAccess


def pread(file: TarFile, num_bytes: int, offset: int) -> bytes:
    """Up to `num_bytes` at `offset`."""
    return (
        os.pread(file, num_bytes, offset)
        if isinstance(file, int)
        else file.pread(num_bytes, offset)
    )


def walk_tar(fd: TarFile, *, start: int = 0, end: int) -> Iterator[TarMember]:
    """Members in bytes [start, end) of an open file, in order. Raises TarDefect."""
    window = _Window(fd, end)
    position = start
    extension: _Extension | None = None
    while True:
        header = window.block(position)
        if header is None or not _checksum_fits(header):
            break
        num_bytes = _number(header[124:136], offset=position)
        data = position + BLOCK
        kind = header[156:157]
        if kind in b"LKxXg":
            extension = extension or _Extension()
            _read_extension(window, kind, extension, offset=data, num_bytes=num_bytes)
            position = data + _padded(num_bytes)
            continue
        if extension is not None and extension.num_bytes is not None:
            num_bytes = extension.num_bytes
        if kind == b"S":
            data = _after_sparse_map(window, header, position)
        member = _member(header, kind, extension, offset=data, num_bytes=num_bytes)
        if data + member.num_bytes > end:
            raise TarDefect("truncated inside a member", offset=end)
        yield member
        extension = None
        position = data + _padded(member.num_bytes)
    if header is None or header != ZEROS:
        raise _bad_header(window, header, start=start, position=position)
    _check_end(window, position, after_extension=extension is not None)


def _member(
    header: bytes, kind: bytes, extension: _Extension | None, *, offset: int, num_bytes: int
) -> TarMember:
    name = header[:100].partition(b"\0")[0]
    # GNU stores times where POSIX stores the prefix of a long name.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    if extension is not None and extension.long_name is not None:
        name = extension.long_name
    text = name.decode("utf-8", "surrogateescape")
    if kind == b"0":
        is_sparse = extension is not None and extension.is_sparse
        return TarMember(text, offset, num_bytes, "sparse" if is_sparse else "file")
    if kind in KIND_WITHOUT_DATA:
        return TarMember(text, offset, 0, KIND_WITHOUT_DATA[kind])
    if kind == b"S" or (extension is not None and extension.is_sparse):
        return TarMember(text, offset, num_bytes, "sparse")
    if kind == b"\0" and text.endswith("/"):  # a folder in tars from before POSIX
        return TarMember(text, offset, 0, "folder")
    return TarMember(text, offset, num_bytes, "file" if kind in b"\x007" else "special")


class _Window:
    """Reads headers ahead: far when members are small, little when they are large."""

    __slots__ = ("fd", "end", "data", "start", "size")

    def __init__(self, fd: TarFile, end: int) -> None:
        self.fd, self.end, self.data, self.start = fd, end, b"", 0
        self.size = SMALLEST_WINDOW

    def block(self, offset: int) -> bytes | None:
        """The block at `offset`; None if the tar ends before or inside it."""
        position = offset - self.start
        if not 0 <= position <= len(self.data) - BLOCK:
            if offset + BLOCK > self.end:
                return None
            self._fill(offset)
            position = 0
        return self.data[position : position + BLOCK]

    def _fill(self, offset: int) -> None:
        gap = offset - self.start - len(self.data)
        near = gap < 4 * BLOCK + self.size // 2
        self.size = min(self.size * 2, LARGEST_WINDOW) if near else SMALLEST_WINDOW
        self.data = self.read(offset, min(self.size, self.end - offset), at_least=BLOCK)
        self.start = offset

    def read(self, offset: int, num_bytes: int, *, at_least: int) -> bytes:
        """Up to `num_bytes`; raises TarDefect if the file has shrunk below `at_least`."""
        data = pread(self.fd, num_bytes, offset)
        while len(data) < at_least:
            more = pread(self.fd, num_bytes - len(data), offset + len(data))
            if not more:
                raise TarDefect("truncated", offset=offset + len(data))
            data += more
        return data


def _byte_sum(data: bytes) -> int:
    """Sum of at most 256 bytes: the low half of Adler-32 minus one, which cannot overflow."""
    return (adler32(data) & 0xFFFF) - 1


def _checksum_fits(header: bytes) -> bool:
    field = header[148:156]
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits.isdigit():
        return False
    try:
        claimed = int(digits, 8)
    except ValueError:
        return False
    total = _byte_sum(header[:256]) + _byte_sum(header[256:]) - _byte_sum(field) + 8 * ord(" ")
    if total == claimed:
        return True
    # Some old programs sum signed characters.
    others = header[:148] + header[156:]
    return total - 256 * sum(byte >> 7 for byte in others) == claimed


def _number(field: bytes, *, offset: int) -> int:
    """A number of a header: octal digits, or big-endian binary after the byte 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    # int() also accepts signs and underscores.
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise TarDefect("header with an invalid size", offset=offset)
    return int(digits, 8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _read_extension(
    window: _Window, kind: bytes, extension: _Extension, *, offset: int, num_bytes: int
) -> None:
    limit = MAX_LONG_NAME_BYTES if kind in b"LK" else MAX_PAX_BYTES
    if num_bytes > limit:
        what = f"header with a name or attributes of {num_bytes} bytes"
        raise TarDefect(what, offset=offset - BLOCK)
    if offset + num_bytes > window.end:
        raise TarDefect("truncated inside a long name", offset=window.end)
    if kind == b"K":  # target of a link
        return
    data = window.read(offset, num_bytes, at_least=num_bytes)[:num_bytes]
    if kind == b"L":
        extension.long_name = data.partition(b"\0")[0]
        return
    for key, value in _pax_records(data, offset=offset):
        if kind == b"g":
            if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
                raise TarDefect(
                    "a global header sets one name or size for all members", offset=offset
                )
        elif key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise TarDefect("header with an invalid size", offset=offset)
            extension.num_bytes = int(value)
        elif key in (b"path", b"GNU.sparse.name"):
            extension.long_name = value
        extension.is_sparse |= key.startswith(b"GNU.sparse.")


def _pax_records(data: bytes, *, offset: int) -> Iterator[tuple[bytes, bytes]]:
    """Records `LENGTH KEY=VALUE\\n`; the length includes itself."""
    position = 0
    while position < len(data):
        digits = data[position : position + 9].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if position + length > len(data) or not equals or not value.endswith(b"\n"):
            raise TarDefect("damaged attributes", offset=offset + position)
        yield key, value[:-1]
        position += length


def _after_sparse_map(window: _Window, header: bytes, position: int) -> int:
    """Offset after the extra map blocks of an old GNU sparse file."""
    more = header[482]
    data = position + BLOCK
    while more:
        block = window.block(data)
        if block is None:
            raise TarDefect("truncated inside a sparse map", offset=window.end)
        more = block[504]
        data += BLOCK
    return data


def _bad_header(window: _Window, header: bytes | None, *, start: int, position: int) -> TarDefect:
    if position == start:
        first = window.read(start, max(0, min(BLOCK, window.end - start)), at_least=0)
        for magic, method in COMPRESSION_MAGIC.items():
            if first.startswith(magic):
                return CompressedTar(method, offset=start)
    if header is None:
        return TarDefect("truncated before the end mark", offset=window.end)
    return TarDefect("damaged header" if position > start else "not a tar header", offset=position)


def _check_end(window: _Window, position: int, *, after_extension: bool) -> None:
    """Check for two blocks of zeros, followed only by zeros (padding to a tape record)."""
    if after_extension:
        raise TarDefect("a long name without its member", offset=position)
    second = window.block(position + BLOCK)
    if second is None:
        raise TarDefect("truncated inside the end mark", offset=window.end)
    if window.end - position > MAX_PADDING_BYTES:
        raise TarDefect(f"{window.end - position} bytes after the last member", offset=position)
    offset = position + BLOCK
    while offset < window.end:
        data = window.read(offset, min(LARGEST_WINDOW, window.end - offset), at_least=1)
        if data.count(0) != len(data):
            num_zeros = len(data) - len(data.lstrip(b"\0"))
            raise TarDefect("data after the end mark", offset=offset + num_zeros)
        offset += len(data)
