"""Make thumbnails of stored and rejected images.

Owns: finding an image again (in a shard, in a source, in a tar of the source) and shrinking it
within bounds on bytes and pixels. Nothing is extracted, nothing outside the given folder is read.
Leaves out: the page that shows them (`report`).
"""

from __future__ import annotations

import base64
import io
import os
import warnings
from pathlib import Path

from PIL import Image, ImageFile

from data_prep.shards.tar_walk import TarDefect, walk_tar
from data_prep.sources.paths import is_tar_name

SIDE = 128
MAX_BYTES = 64 << 20
MAX_PIXELS = 50_000_000
STORED_FORMATS = ("JPEG", "PNG", "WEBP")
REJECTED_FORMATS = (*STORED_FORMATS, "GIF", "BMP")
# Decoding these may take unlimited time or memory: that is why they were rejected.
NOT_OPENED = frozenset({"bomb", "too_many_pixels", "too_large", "not_a_file", "link_outside"})


def stored_thumbnail(path: Path, *, offset: int, num_bytes: int) -> str | None:
    """A sample of a shard as JPEG in base64; None if it cannot be shown."""
    if not 0 <= num_bytes <= MAX_BYTES or offset < 0:
        return None
    try:
        with open(path, "rb") as file:
            return _shrunk(os.pread(file.fileno(), num_bytes, offset), STORED_FORMATS)
    except OSError:
        return None


def rejected_thumbnail(source: Path, path: str, *, reason: str) -> str | None:
    """An input, by its path in the ledger, as JPEG in base64; None if it cannot be shown."""
    if reason in NOT_OPENED:
        return None
    data = _input_bytes(source.expanduser(), path)
    if data is None:
        return None
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        return _shrunk(data, REJECTED_FORMATS)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _shrunk(data: bytes, formats: tuple[str, ...]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as image:
                if image.width * image.height > MAX_PIXELS:
                    return None
                image.draft("RGB", (2 * SIDE, 2 * SIDE))
                small = image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        small.save(file, format="JPEG", quality=80)
    except Exception:  # damaged images make decoders raise anything
        return None
    return base64.b64encode(file.getvalue()).decode("ascii")


def _input_bytes(source: Path, path: str) -> bytes | None:
    """The bytes of an input: a file below the source, or a member of a tar below it."""
    try:
        if source.is_file():
            top, _, name = path.partition("/")
            if is_tar_name(source.name):
                return _member_of(source, name) if top == source.name else None
            source = source.parent  # of a table, which names files next to it
        inside = source.resolve()
        parts = path.split("/")
        for num in range(len(parts), 0, -1):
            file = (source / "/".join(parts[:num])).resolve()
            if not file.is_relative_to(inside) or not file.is_file():
                continue
            if num < len(parts):
                return _member_of(file, "/".join(parts[num:]))
            return file.read_bytes() if file.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        pass
    return None


def _member_of(tar: Path, name: str) -> bytes | None:
    """A member's bytes; `a.tar/b.jpg` is a member of a tar inside the tar."""
    with open(tar, "rb") as file:
        fd = file.fileno()
        return _find(fd, name, start=0, end=os.fstat(fd).st_size, depth=0)


def _find(fd: int, name: str, *, start: int, end: int, depth: int) -> bytes | None:
    try:
        for member in walk_tar(fd, start=start, end=end):
            if member.kind != "file":
                continue
            if member.name == name:
                if member.num_bytes > MAX_BYTES:
                    return None
                return os.pread(fd, member.num_bytes, member.offset)
            if depth == 0 and name.startswith(member.name + "/"):
                after = member.offset + member.num_bytes
                rest = name[len(member.name) + 1 :]
                return _find(fd, rest, start=member.offset, end=after, depth=1)
    except TarDefect:
        pass
    return None
