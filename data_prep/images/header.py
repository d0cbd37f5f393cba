"""Read the headers of JPEG, PNG and WebP files without decoding and without Pillow.

Owns: the parsers, their bounds on work, and the signs in a file that it is not whole.
Leaves out: what is allowed (`check`), conversion of pixels (`convert`).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

# Far above those of cameras and editors: a larger number is an attack on readers.
MAX_SEGMENTS = 10_000
MAX_CHUNKS = 1_000_000
MAX_SCANS = 100
# A scan visits every block, whatever its bytes, so scans times pixels bound the time of decoding.
# Writers make about 10 scans; with more of them, the image must be small.
ORDINARY_SCANS = 20
MAX_SCAN_PIXELS = 400_000_000
STRAY_PIECE_BYTES = 1 << 12

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Colour type -> (samples per pixel, bit depths): PNG specification, table 11.1.
PNG_COLOUR_TYPES = {
    0: (1, (1, 2, 4, 8, 16)),
    2: (3, (8, 16)),
    3: (1, (1, 2, 4, 8)),
    4: (2, (8, 16)),
    6: (4, (8, 16)),
}
PNG_GREY, PNG_RGB, PNG_PALETTE, PNG_GREY_ALPHA, PNG_RGB_ALPHA = PNG_COLOUR_TYPES
# Colour types that a tRNS chunk can make transparent.
PNG_KEYED = (PNG_GREY, PNG_RGB, PNG_PALETTE)
# Deflate packs 258 bytes into two bits at best.
DEFLATE_MAX_RATIO = 1032
MAX_UNPACKED_TEXT = 1 << 20
OTHER_FORMATS = (b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\x00\x00\x01\x00", b"8BPS", b"\xff\x0a")
OTHER_BRANDS = (b"ftypavif", b"ftypavis", b"ftypheic", b"ftypheix", b"ftypmif1", b"jP  \r\n\x87\n")

_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ORDINARY_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_EXIF = b"Exif\0\0"


class HeaderError(Exception):
    """The file is not a readable image; `reason` is a key of `images.check.FAULTS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# Not frozen: that would take 3 microseconds more per image.
@dataclass(slots=True)
class Header:
    format: str
    """jpeg, png or webp."""
    width: int
    height: int
    """As stored, before any rotation."""
    fault: str | None = None
    """A key of `images.check.FAULTS` where pixels are known to be missing."""
    certain: bool = True
    """The header has nothing unusual; otherwise only decoding shows whether it can be read."""
    changes: tuple[str, ...] = ()
    """Deviations from a plain 8-bit image, in the order of `images.check.CHANGES`."""
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    lossy: bool = True
    bit_depth: int = 8
    colour_type: int = -1
    """PNG only."""
    transparent: bytes = b""
    """Content of a PNG's tRNS chunk."""


def read_header(data: bytes) -> Header:
    """Raises HeaderError; never reads more than a few bytes per segment.

    A file is read in place. The coded data of a JPEG are copied once if it is progressive, or
    if anything follows its end.
    """
    start = bytes(data[:12])
    try:
        if start.startswith(b"\xff\xd8\xff"):
            return _jpeg_header(data)
        if start.startswith(PNG_SIGNATURE):
            return _png_header(memoryview(data))
        if start.startswith(b"RIFF") and start.endswith(b"WEBP"):
            return _webp_header(memoryview(data))
    except (IndexError, struct.error):
        raise HeaderError("bad_header") from None
    if start.startswith(OTHER_FORMATS) or start[4:] in OTHER_BRANDS:
        raise HeaderError("other_format")
    raise HeaderError("not_an_image")


def _jpeg_header(data: bytes) -> Header:
    position = 2
    frame = width = height = components = bits = scan_components = 0
    orientation = 0
    has_codes = has_quantization = has_stray = False
    for _ in range(MAX_SEGMENTS):
        if data[position] != 0xFF or not data[position + 1]:
            position, has_stray = _next_marker(data, position + 1), True
            continue
        marker = data[position + 1]
        if marker == 0xFF or marker in _JPEG_ALONE:  # a fill byte, or a marker without content
            position += 1 if marker == 0xFF else 2
            continue
        if marker < 0xC0 or marker == 0xD9:
            raise HeaderError("bad_header")
        length = data[position + 2] << 8 | data[position + 3]
        if length < 2:
            raise HeaderError("bad_header")
        if marker == 0xC4:
            has_codes = True
        elif marker == 0xDB:
            has_quantization = True
        elif marker in _JPEG_FRAMES:
            if frame:
                raise HeaderError("bad_header")
            frame = marker
            bits, height, width, components = struct.unpack_from(">BHHB", data, position + 4)
        elif marker == 0xE1 and not orientation and data[position + 4 : position + 10] == _EXIF:
            orientation = exif_orientation(bytes(data[position + 10 : position + 2 + length]))
        position += 2 + length
        if marker == 0xDA:
            scan_components = data[position - length + 2]
            break
    else:
        raise HeaderError("bomb")
    if not (frame and width and height):
        raise HeaderError("bad_header")
    # A decoder stops after the first scan only if that holds all components of a baseline frame.
    if frame != 0xC0 or scan_components < components:
        _check_scans(1 + bytes(data[position:]).count(b"\xff\xda"), width * height)
    # The code of a block of 8 x 8 takes a bit at least.
    is_short = frame in _JPEG_ORDINARY_FRAMES and (len(data) - position) * 1024 < width * height
    # Coded pixels never contain these two bytes, so the end of the image is missing only if they do
    # not occur at all; other data may follow it.
    is_open = data[-2:] != b"\xff\xd9" and b"\xff\xd9" not in bytes(data[position:])
    fault = "bad_pixels" if is_short or is_open else None
    certain = (
        frame in _JPEG_ORDINARY_FRAMES
        and bits == 8
        and components in (1, 3, 4)
        and has_codes
        and has_quantization
        and not has_stray
    )
    changes: tuple[str, ...] = ("cmyk",) if components == 4 else ()
    if orientation > 1:
        changes += ("exif_rotation",)
    return Header("jpeg", width, height, fault, certain, changes, orientation or 1)


def _next_marker(data: bytes, position: int) -> int:
    """Where the next 0xFF is. Raises IndexError if there is none."""
    while piece := bytes(data[position : position + STRAY_PIECE_BYTES]):
        if (found := piece.find(b"\xff")) >= 0:
            return position + found
        position += len(piece)
    raise IndexError


def _check_scans(num_scans: int, num_pixels: int) -> None:
    too_long = num_scans > ORDINARY_SCANS and num_scans * num_pixels > MAX_SCAN_PIXELS
    if num_scans > MAX_SCANS or too_long:
        raise HeaderError("bomb")


def exif_orientation(tiff: bytes | memoryview) -> int:
    """Orientation 1 to 8 in the first directory; 1 if there is none or it cannot be read."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, place)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass  # viewers ignore a broken directory and show the image as stored
    return 1


def _png_header(data: memoryview) -> Header:
    length, kind, width, height, depth, colour, packing, filtering, interlace, checksum = (
        struct.unpack_from(">I4sIIBBBBBI", data, 8)
    )
    if kind != b"IHDR" or length != 13 or zlib.crc32(data[12:29]) != checksum:
        raise HeaderError("bad_header")
    samples, depths = PNG_COLOUR_TYPES.get(colour, (0, ()))
    if not (width and height) or depth not in depths or packing or filtering or interlace > 1:
        raise HeaderError("bad_header")
    chunks = _png_chunks(data, keyed=colour in PNG_KEYED)
    fault = chunks.fault
    if colour == PNG_PALETTE and not chunks.has_palette:
        fault = "bad_header"
    elif chunks.num_pixel_bytes * DEFLATE_MAX_RATIO < (width * samples * depth + 7) // 8 * height:
        fault = fault or "bad_pixels"
    changes = []
    if depth == 16:
        changes.append("16_bit")
    if chunks.transparent or colour in (PNG_GREY_ALPHA, PNG_RGB_ALPHA):
        changes.append("transparency")
    if chunks.animated:
        changes.append("animation")
    if chunks.orientation > 1:
        changes.append("exif_rotation")
    return Header(
        "png",
        width,
        height,
        fault,
        chunks.certain,
        tuple(changes),
        chunks.orientation,
        lossy=False,
        bit_depth=depth,
        colour_type=colour,
        transparent=chunks.transparent,
    )


@dataclass(slots=True)
class _Chunks:
    """What is known from the chunks of a PNG."""

    fault: str | None = None
    certain: bool = True
    num_pixel_bytes: int = 0
    has_palette: bool = False
    animated: bool = False
    orientation: int = 1
    transparent: bytes = b""


def _png_chunks(data: memoryview, *, keyed: bool) -> _Chunks:
    chunks = _Chunks()
    position = 33
    for _ in range(MAX_CHUNKS):
        if position + 12 > len(data):
            chunks.fault = "bad_pixels" if chunks.num_pixel_bytes else "bad_header"
            return chunks
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IDAT":
            chunks.num_pixel_bytes += length
        elif kind == b"IEND":
            return chunks
        elif kind == b"PLTE":
            chunks.has_palette = True
            _check_small_chunk(data, position, length)
        elif kind == b"acTL":
            chunks.animated = chunks.animated or not chunks.num_pixel_bytes
        elif kind == b"tRNS" and keyed and not chunks.num_pixel_bytes:
            _check_small_chunk(data, position, length)
            chunks.transparent = bytes(data[position + 8 : position + 8 + length])
        else:
            if kind == b"eXIf":
                tiff = data[position + 8 : position + 8 + length]
                chunks.orientation = exif_orientation(tiff)
            chunks.certain = chunks.certain and _is_plain_chunk(data, position, length)
        position += 12 + length
    raise HeaderError("bomb")


def _is_plain_chunk(data: memoryview, position: int, length: int) -> bool:
    """Whether this text or profile is accepted by readers: Pillow rejects bad checksums and more
    than 1 MiB unpacked."""
    if length * DEFLATE_MAX_RATIO > MAX_UNPACKED_TEXT:
        return False
    end = position + 8 + length
    return zlib.crc32(data[position + 4 : end]) == int.from_bytes(data[end : end + 4])


def _check_small_chunk(data: memoryview, position: int, length: int) -> None:
    """Palettes have at most 256 entries, so checks without decoding stay cheap."""
    if length > 768 or length + position + 12 > len(data):
        raise HeaderError("bad_header")
    end = position + 8 + length
    if zlib.crc32(data[position + 4 : end]) != int.from_bytes(data[end : end + 4]):
        raise HeaderError("bad_header")


def critical_chunks(png: bytes | memoryview) -> list[memoryview]:
    """Parts that joined make the file with nothing but what its pixels are made of.

    No profile, text or further frame reaches the decoder, whatever they unpack to; and the decoder
    itself (Pillow's) skips the checksums of pixels. Raises HeaderError where one is wrong.
    """
    view = memoryview(png)
    position = len(PNG_SIGNATURE)
    parts = [view[:position]]
    kind = b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", png, position)
        end = position + 8 + length
        if kind[0] < 0x60:  # upper case: critical, decoders need it
            if zlib.crc32(view[position + 4 : end]) != struct.unpack_from(">I", png, end)[0]:
                raise HeaderError("bad_pixels")
            parts.append(view[position : end + 4])
        position = end + 4
    return parts


def _webp_header(data: memoryview) -> Header:
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    if end > len(data):
        raise HeaderError("bad_pixels")
    kind = data[12:16]
    if kind == b"VP8X":
        return _webp_extended_header(data, end)
    width, height, transparent = _webp_frame(data, 12)
    changes = ("transparency",) if transparent else ()
    return Header("webp", width, height, changes=changes, lossy=kind == b"VP8 ")


def _webp_frame(data: memoryview, position: int) -> tuple[int, int, bool]:
    """Size and transparency of the coded picture in the chunk at `position`."""
    kind = data[position : position + 4]
    if kind == b"VP8 " and data[position + 11 : position + 14] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, position + 14)
        width, height, transparent = width & 0x3FFF, height & 0x3FFF, False
    elif kind == b"VP8L" and data[position + 8] == 0x2F:
        (packed,) = struct.unpack_from("<I", data, position + 9)
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        transparent = bool(packed >> 28 & 1)
    else:
        raise HeaderError("bad_header")
    if not (width and height):
        raise HeaderError("bad_header")
    return width, height, transparent


def _webp_extended_header(data: memoryview, end: int) -> Header:
    flags = data[20]
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    animated = bool(flags & 0x02)
    lossy = True
    has_picture = False
    orientation = 1
    position = 12
    for _ in range(MAX_SEGMENTS):
        if position + 8 > end:
            break
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind in (b"VP8 ", b"VP8L", b"ANMF"):
            has_picture = True
            if kind != b"ANMF" and _webp_frame(data, position)[:2] != (width, height):
                raise HeaderError("bad_header")
            lossy = lossy and b"VP8L" not in (kind, data[position + 24 : position + 28])
        elif kind == b"EXIF":
            block = data[position + 8 : position + 8 + length]
            orientation = exif_orientation(block[len(_EXIF) :] if block[:6] == _EXIF else block)
        position += 8 + length + (length & 1)
    else:
        raise HeaderError("bomb")
    if not has_picture:
        raise HeaderError("bad_pixels")
    changes = []
    if flags & 0x10:
        changes.append("transparency")
    if animated:
        changes.append("animation")
    if orientation > 1:
        changes.append("exif_rotation")
    # An odd length's padding byte may be missing at the end.
    certain = position <= end + 1
    return Header("webp", width, height, None, certain, tuple(changes), orientation, lossy)
