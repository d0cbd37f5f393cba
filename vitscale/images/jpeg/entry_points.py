"""Places inside a JPEG where decoding can start, found once and kept beside the shards.

The file of one tar holds, little-endian: MAGIC; the number of images N as uint64; N uint64, the
first 8 bytes of each image's BLAKE3, rising; N + 1 uint64, where its entry points begin; N uint32,
their CRC-32; and the entry points, one after the other. Images without any are left out.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import make_folders, write_bytes

FOLDER_NAME = "entry_points"
SUFFIX = ".jpt"
MAGIC = b"VSENTRY1"
MAX_PIXELS = 1 << 28
# MCUs, of 8 or 16 pixels, from one entry point to the next.
EVERY = 16
MAX_OPEN_FILES = 64


def find_entry_points(image: bytes | memoryview, *, every: int = EVERY) -> bytes:
    """The entry points of an image, `every` MCUs of each row; empty if it can have none.

    These are ordinary JPEGs in one scan without restart markers; on a machine without the C
    extension or AVX2 there are none.
    """
    try:
        from vitscale.images.jpeg import _region

        return _region.entries(image, every, MAX_PIXELS)
    except (
        ImportError,
        AttributeError,
        ValueError,
    ):  # ValueError: not a JPEG, or damaged
        return b""


def require_entry_points(*, where: str) -> None:
    """Raise UserError if this machine cannot find entry points. where: the setting."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    if not find_entry_points(file.getvalue()):
        raise UserError(
            "this machine cannot find entry points: that needs AVX2 and the C extension",
            where=where,
            next_step="install gcc and libjpeg-turbo's headers, then vitscale again",
        )


def entry_points_file(folder: Path, tar: str) -> Path:
    """Where a shard folder has the entry points of one of its tars."""
    return folder / FOLDER_NAME / f"{tar.removesuffix('.tar')}{SUFFIX}"


def write_entry_points(path: Path, found: Mapping[int, bytes]) -> None:
    """found: first 8 bytes of an image's BLAKE3, little-endian -> its entry points."""
    # Images without entry points are left out, since a missing key says the same.
    keys = sorted(key for key, points in found.items() if points)
    starts = np.cumsum([0, *(len(found[key]) for key in keys)], dtype="<u8")
    sums = np.array([crc32(found[key]) for key in keys], dtype="<u4")
    tables = (np.array(keys, "<u8"), starts, sums)
    pieces = [
        MAGIC,
        len(keys).to_bytes(8, "little"),
        *(table.tobytes() for table in tables),
    ]
    make_folders(path.parent)
    write_bytes(path, b"".join([*pieces, *(found[key] for key in keys)]))


def read_entry_points(path: Path, *, key: int) -> bytes:
    """The entry points of an image; empty if there are none, or the file is missing or damaged.

    key: first 8 bytes of its BLAKE3, little-endian.
    """
    keys, starts, sums, points = _open(path)
    # Keys are sorted, so a search reads a few pages of the mapped file instead of all.
    row = int(keys.searchsorted(np.uint64(key)))
    if row == len(keys) or int(keys[row]) != key:
        return b""
    found = bytes(points[int(starts[row]) : int(starts[row + 1])])
    # Damaged points would give wrong pixels; without any the image is decoded from the top.
    if crc32(found) == int(sums[row]):
        return found
    return b""


@lru_cache(maxsize=MAX_OPEN_FILES)
def _open(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, memoryview]:
    """Keys, starts, checksums and entry points of a file, mapped; no keys if it is missing or not
    of this format."""
    none = np.zeros(0, "<u8")
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        data = memoryview(b"")

    # Behind the head there are 20 bytes per image (key, start, sum), and one more start.
    head = len(MAGIC) + 8
    num = int.from_bytes(data[len(MAGIC) : head], "little")
    if not num or data[: len(MAGIC)] != MAGIC or head + 20 * num + 8 > len(data):
        return none, none, none, data

    keys = np.frombuffer(data, "<u8", num, head)
    starts = np.frombuffer(data, "<u8", num + 1, head + 8 * num)
    sums = np.frombuffer(data, "<u4", num, head + 16 * num + 8)
    points = data[head + 20 * num + 8 :]
    # The file was cut off if its last start is not its end.
    return keys if int(starts[num]) == len(points) else none, starts, sums, points
