"""Create broken and unusual files to plant in a corpus.

Owns: one function per fault, and the expected outcome in data preparation.
Leaves out: where they are planted (`glyph_corpus`).
"""

from __future__ import annotations

import gzip
import io
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageOps

REJECTED, KEPT, CONVERTED, REPAIRED = "rejected", "kept", "converted", "repaired"
EITHER = "either"  # depends on whether the decoder detects the damage
COPY = "copy"  # equal or similar to its original
NOT_AN_IMAGE = "not_an_image"  # by its name: in the ledger, does not count as bad
BOMB_SIDE = 60_000


@dataclass(frozen=True, slots=True)
class Fault:
    """`make` takes an image and a random generator, and returns the bytes of a file."""

    suffix: str
    expected: str
    make: Callable[[Image.Image, random.Random], bytes] | None
    """None: the bytes and the suffix of the original file."""
    prefix: str = ""
    """Prefix of the file's name."""


def _saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _jpeg(image: Image.Image, **options: Any) -> bytes:
    return _saved(image.convert("RGB"), "JPEG", **{"quality": 90, **options})


def _scan_start(jpeg: bytes | bytearray) -> int:
    """First byte of the compressed pixels."""
    marker = jpeg.index(b"\xff\xda")
    return marker + 2 + int.from_bytes(jpeg[marker + 2 : marker + 4], "big")


def truncated(data: bytes, rng: random.Random) -> bytes:
    """Cut in the second half, at least 16 bytes before the end."""
    return data[: rng.randrange(len(data) // 2, len(data) - 16)]


def flipped_bytes(image: Image.Image, rng: random.Random) -> bytes:
    """A JPEG with bits turned over in its compressed pixels."""
    jpeg = bytearray(_jpeg(image))
    for _ in range(8):
        jpeg[rng.randrange(_scan_start(jpeg), len(jpeg) - 2)] ^= 1 << rng.randrange(8)
    return bytes(jpeg)


def broken_header(image: Image.Image, _: random.Random) -> bytes:
    """A JPEG whose segment lengths have become zeros."""
    jpeg = bytearray(_jpeg(image))
    jpeg[4 : _scan_start(jpeg)] = bytes(_scan_start(jpeg) - 4)
    return bytes(jpeg)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def bomb_png(_: Image.Image, __: random.Random) -> bytes:
    """About 100 bytes that claim 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", BOMB_SIDE, BOMB_SIDE, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(bytes(1000)))
        + png_chunk(b"IEND", b"")
    )


def bomb_jpeg(image: Image.Image, _: random.Random) -> bytes:
    """A small JPEG whose header claims 60,000 x 60,000 pixels."""
    jpeg = bytearray(_jpeg(image))
    sizes = jpeg.index(b"\xff\xc0") + 5
    jpeg[sizes : sizes + 4] = struct.pack(">HH", BOMB_SIDE, BOMB_SIDE)
    return bytes(jpeg)


def _animated_webp(image: Image.Image, _: random.Random) -> bytes:
    second = ImageOps.invert(image.convert("RGB"))
    return _saved(image.convert("RGB"), "WEBP", save_all=True, append_images=[second])


def _deep_grey(image: Image.Image, _: random.Random) -> bytes:
    grey = image.convert("L")
    values = b"".join(struct.pack("<H", 257 * v) for v in grey.tobytes())
    return _saved(Image.frombytes("I;16", grey.size, values), "PNG")


def _with_alpha(image: Image.Image, _: random.Random) -> bytes:
    colours = image.convert("RGB")
    colours.putalpha(ImageOps.invert(image.convert("L")))
    return _saved(colours, "PNG")


def _turned(image: Image.Image, _: random.Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    return _jpeg(image, exif=exif)


def _smaller(image: Image.Image, _: random.Random) -> bytes:
    size = (max(8, image.width * 3 // 4), max(8, image.height * 3 // 4))
    return _jpeg(image.resize(size, Image.Resampling.LANCZOS))


FAULTS: dict[str, Fault] = {
    # Broken
    "zero_bytes": Fault("jpg", REJECTED, lambda image, rng: b""),
    "html_page": Fault(
        "jpg", REJECTED, lambda image, rng: b"<!DOCTYPE html><title>404 Not Found</title>"
    ),
    "random_bytes": Fault("jpg", REJECTED, lambda image, rng: rng.randbytes(4096)),
    "truncated_jpeg": Fault("jpg", REJECTED, lambda i, rng: truncated(_jpeg(i), rng)),
    "truncated_png": Fault("png", REJECTED, lambda i, rng: truncated(_saved(i, "PNG"), rng)),
    "broken_header": Fault("jpg", REJECTED, broken_header),
    "flipped_bytes": Fault("jpg", EITHER, flipped_bytes),
    # Not plain 8-bit RGB or grey; a palette without transparency decodes to plain RGB
    "cmyk": Fault("jpg", CONVERTED, lambda i, _: _saved(i.convert("CMYK"), "JPEG")),
    "deep_grey": Fault("png", CONVERTED, _deep_grey),
    "palette": Fault("png", KEPT, lambda i, _: _saved(i.convert("P"), "PNG")),
    "palette_transparent": Fault(
        "png", CONVERTED, lambda i, _: _saved(i.convert("P"), "PNG", transparency=0)
    ),
    "alpha": Fault("png", CONVERTED, _with_alpha),
    "animated": Fault("webp", CONVERTED, _animated_webp),
    "turned_by_exif": Fault("jpg", CONVERTED, _turned),
    # Larger than they look
    "bomb_png": Fault("png", REJECTED, bomb_png),
    "bomb_jpeg": Fault("jpg", REJECTED, bomb_jpeg),
    # Wrapped or misnamed
    "gzip_jpeg": Fault("jpg", REPAIRED, lambda i, _: gzip.compress(_jpeg(i), mtime=0)),
    "png_named_jpg": Fault("jpg", KEPT, lambda i, _: _saved(i, "PNG")),
    "gif": Fault("gif", REJECTED, lambda i, _: _saved(i.convert("P"), "GIF")),
    "hidden": Fault("jpg", NOT_AN_IMAGE, lambda i, _: _jpeg(i), prefix="."),
    "text_file": Fault("txt", NOT_AN_IMAGE, lambda image, rng: b"notes\n"),
    # Alike
    "same_bytes": Fault("", COPY, None),
    "encoded_again": Fault("jpg", COPY, lambda i, _: _jpeg(i, quality=60)),
    "resized": Fault("jpg", COPY, _smaller),
    "mirrored": Fault("jpg", COPY, lambda i, _: _jpeg(ImageOps.mirror(i))),
}
