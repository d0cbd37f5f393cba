"""Decode ordinary PNG images: chunks here, inflating by ISA-L, rows by the C extension.

Owns: which files are left to Pillow: every file that is unusual or damaged in any way, also where
Pillow does not look (checksums of pixels, bytes after the end). Pillow then decides.
torchvision 0.29's `decode_png` ends the process with a segmentation fault on a damaged file.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from PIL import Image

START = b"\x89PNG\r\n\x1a\n"
# Colour types of the PNG specification, section 11.2.1.
GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
SAMPLES = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
MAX_COLOURS = 256
DEFLATE_RATIO = 1032  # deflate's best
# Chunks that do not change Pillow's pixels, with the least length that Pillow accepts.
HARMLESS = {
    **{b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"eXIf": 0, b"bKGD": 0, b"sBIT": 0},
    **{b"tIME": 0, b"hIST": 0, b"cICP": 0, b"oFFs": 0, b"orNT": 0, b"vpAg": 0, b"iDOT": 0},
}
TEXTS = (b"tEXt", b"zTXt", b"iTXt")
MAX_TEXT_BYTES = 16 << 20  # of all texts; Pillow refuses 4 times as many
MAX_UNPACKED_BYTES = 1 << 20  # of a text or profile, as in Pillow

Chunk = tuple[bytes, memoryview]


class LeftToPillow(ValueError):
    """An image is unusual or damaged."""


@dataclass(frozen=True, slots=True)
class InflatedPng:
    """A PNG whose rows are inflated, but still filtered."""

    width: int
    height: int
    colour: int
    palette: bytes | memoryview
    """3 bytes per colour; empty for other colour types."""
    coded: bytes
    """Rows: each has the number of its filter, then its filtered samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Part of an image, and how to resample it."""

    corners: tuple[int, int, int, int]
    """Left, top, width, height."""
    cubic: bool
    antialias: bool
    flip: bool
    allow_avx2: bool


def size_of(data: bytes, *, max_pixels: int) -> tuple[int, int] | None:
    """Width and height from the header; None if that is left to Pillow."""
    if not data.startswith(START) or len(data) < 24:
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return (width, height) if 0 < width * height <= max_pixels else None


def whole(data: bytes, *, max_pixels: int) -> torch.Tensor | None:
    """All pixels of a PNG, uint8 [H, W, 3]; None if the image is left to Pillow."""
    extension = _extension()
    if extension is None or not data.startswith(START):
        return None
    try:
        pixels = inflate(data, max_pixels=max_pixels)
        out = torch.empty((pixels.height, pixels.width, 3), dtype=torch.uint8)
        extension.whole(pixels.coded, _header_of(pixels), pixels.palette, out.numpy())
    except ValueError:
        return None
    return out


def crop(data: bytes, out: np.ndarray, box: Box, *, max_pixels: int) -> bool:
    """Fill `out`, contiguous uint8 [3, R, C]; False if the image is left to Pillow."""
    extension = _extension()
    if extension is None or not data.startswith(START):
        return False
    try:
        pixels = inflate(data, max_pixels=max_pixels)
        extension.crop(
            pixels.coded, _header_of(pixels), pixels.palette, box.corners, out, out.shape[1:],
            box.cubic, box.antialias, box.flip, box.allow_avx2,
        )  # fmt: skip
    except (ValueError, OverflowError):
        return False
    return True


def _header_of(pixels: InflatedPng) -> tuple[int, int, int]:
    return pixels.width, pixels.height, pixels.colour


@lru_cache
def missing() -> str | None:
    """Why Pillow decodes all PNG images on this machine; None if the extension works."""
    try:
        extension = _extension_module()
    except ImportError as error:
        return f"its C extension was not built, or cannot be loaded ({error})"
    # Another Pillow might show transparent images in another way.
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    pixels = inflate(file.getvalue(), max_pixels=noise.size)
    found = np.empty((9, 9, 3), np.uint8)
    extension.whole(pixels.coded, _header_of(pixels), pixels.palette, found)
    expected = np.asarray(Image.open(file).convert("RGB"))
    return None if np.array_equal(found, expected) else "its pixels differ from Pillow's"


@lru_cache
def _extension() -> ModuleType | None:
    return _extension_module() if missing() is None else None


def _extension_module() -> ModuleType:
    """Raises ImportError if it was not built."""
    return importlib.import_module("vitscale.images.png_webp._png")


@lru_cache
def _zlib() -> ModuleType:
    """ISA-L's, in less than half of the time; or Python's own, where it has no wheel."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def inflate(data: bytes, *, max_pixels: int) -> InflatedPng:
    """Check all of a PNG but its filters, and inflate it. Raises LeftToPillow."""
    try:
        chunks = list(_chunks_of(data))
        kinds = [kind for kind, _ in chunks]
        first, num = kinds.index(b"IDAT"), kinds.count(b"IDAT")
        before, after = chunks[1:first], chunks[first + num : -1]
        _require(kinds[0] == b"IHDR" and kinds[-1] == b"IEND" and not chunks[-1][1])
        width, height, depth, colour, *others = struct.unpack(">IIBBBBB", chunks[0][1])
        _require(depth == 8 and others == [0, 0, 0] and 0 < width * height <= max_pixels)
        colours = {kind: body for kind, body in before if kind in (b"PLTE", b"tRNS")}
        _check_colours(colour, colours.get(b"PLTE"), colours.get(b"tRNS"))
        _check_others([chunk for chunk in before if chunk[0] not in colours] + after)
        _require(len(colours) == kinds.count(b"PLTE") + kinds.count(b"tRNS"))
        packed = b"".join(body for _, body in chunks[first : first + num])
        coded = _inflated(packed, height * (1 + width * SAMPLES[colour]))
    except (ValueError, LookupError, struct.error, zlib.error) as error:
        raise LeftToPillow(str(error)) from None
    palette = colours[b"PLTE"] if colour == PALETTE else b""
    return InflatedPng(width, height, colour, palette, coded)


def _require(is_ordinary: bool) -> None:
    if not is_ordinary:
        raise LeftToPillow("unusual or damaged")


def _chunks_of(data: bytes) -> Iterator[Chunk]:
    """Kinds and bodies, with their checksums verified. Raises struct.error at a cut file."""
    view, crc32, at = memoryview(data), _zlib().crc32, len(START)
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        (checksum,) = struct.unpack_from(">I", data, end)
        _require(crc32(view[at + 4 : end]) == checksum)
        yield kind, view[at + 8 : end]
        at = end + 4


def _check_colours(colour: int, palette: memoryview | None, transparent: memoryview | None) -> None:
    num_colours = len(palette or b"") // 3
    if palette is not None:
        _require(len(palette) % 3 == 0 and 0 < num_colours <= MAX_COLOURS)
    if colour == PALETTE:
        _require(num_colours > 0)
        _require(transparent is None or 0 < len(transparent) <= num_colours)
    elif transparent is not None:
        # One colour of 16 bits per sample: transparent, which changes no pixel.
        _require(colour in (GREY, RGB) and len(transparent) == 2 * SAMPLES[colour])
        _require(not any(transparent[::2]))


def _check_others(chunks: Sequence[Chunk]) -> None:
    num_text_bytes = 0
    for kind, body in chunks:
        if kind in HARMLESS:
            _require(len(body) >= HARMLESS[kind])
            continue
        _require(kind in (*TEXTS, b"iCCP"))
        name, text = bytes(body).split(b"\0", 1)
        # Pillow keeps texts among its own entries, such as `transparency`.
        _require(name[:1].isupper() or b":" in name or kind == b"iCCP")
        num_text_bytes += len(body)
        if kind == b"iTXt":
            _require(text[:2] == b"\0\0")  # not compressed
        elif kind != b"tEXt":
            _require(text[:1] == b"\0")
            num_text_bytes += _unpacked_size(text[1:])
    _require(num_text_bytes <= MAX_TEXT_BYTES)


def _unpacked_size(packed: bytes) -> int:
    """Bytes of a text or profile, at most. Raises LeftToPillow for those that Pillow refuses."""
    bound = DEFLATE_RATIO * len(packed)
    if bound > MAX_UNPACKED_BYTES:
        unpacker = zlib.decompressobj()
        bound = len(unpacker.decompress(packed, MAX_UNPACKED_BYTES))
        _require(not unpacker.unconsumed_tail)
    return bound


def _inflated(packed: bytes, num_bytes: int) -> bytes:
    """Memory grows with what the data hold, up to `num_bytes`. Raises LeftToPillow."""
    # ISA-L does not check the zlib header: deflate, window of at most 32 KiB, no dictionary.
    method, flags = packed[:2]
    _require(method & 15 == 8 and method >> 4 < 8 and flags & 32 == 0)
    _require((256 * method + flags) % 31 == 0 and num_bytes <= DEFLATE_RATIO * len(packed))
    library = _zlib()
    unpacker = library.decompressobj()
    try:
        coded: bytes = unpacker.decompress(packed, num_bytes + 1)
    except library.error as error:
        raise LeftToPillow(str(error)) from None
    _require(len(coded) == num_bytes and unpacker.eof and not unpacker.unused_data)
    return coded
