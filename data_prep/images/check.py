"""Validate images: keep them unchanged, convert them, or reject them with a reason.

Owns: the validation of an input's bytes, and the list of reasons.
Leaves out: where the bytes come from (`sources`), reading headers (`header`), converting pixels
(`convert`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from blake3 import blake3

from data_prep.images.convert import (
    UnreadableHeaderError,
    check_pixels,
    convert,
    is_shrunk,
)
from data_prep.images.header import Header, HeaderError, read_header
from vitscale.runs.data_prep import ImageSettings

# Reason -> meaning. Details: docs/images.md.
FAULTS = {
    "empty": "zero bytes",
    "too_large": "more than 512 MiB, as stored or unpacked from gzip",
    "bad_gzip": "packed with gzip and broken: cannot be unpacked to the end",
    "not_an_image": "content is no image of a known format",
    "other_format": "an image of another format: GIF, BMP, TIFF, AVIF ...",
    "bad_header": "the header is broken, or of a kind that cannot be decoded",
    "bomb": "more segments, chunks or scans than any camera or editor writes",
    "too_many_pixels": "the header claims more than images.max_pixels; nothing was decoded",
    "too_small": "a side is shorter than images.min_side",
    "deep_grey": "16-bit grey, which decoders clip to white; only for tars that are indexed",
    "bad_pixels": "truncated, damaged, or otherwise not decoded to the last pixel",
}
# Conversions, in the order in which `changes` names them.
CHANGES = (
    "gzip",
    "cmyk",
    "16_bit",
    "transparency",
    "animation",
    "exif_rotation",
    "metadata",
    "short_side",
)
SUFFIXES = {"jpeg": "jpg", "png": "png", "webp": "webp"}
MAX_FILE_BYTES = 512 << 20
# Enough of an unpacked file to recognise its format.
PEEK_BYTES = 64
PIECE_BYTES = 1 << 20
UNPACKED_PIECE_BYTES = 16 << 20


@dataclass(slots=True)
class ValidationResult:
    """The outcome of validating one input."""

    reason: str | None
    """None: usable; otherwise a key of FAULTS."""
    input_hash: bytes
    content: bytes
    """Bytes to store: the object given, if nothing was changed; empty if rejected."""
    content_hash: bytes
    extension: str = ""
    """jpg, png or webp, by content."""
    width: int = 0
    height: int = 0
    """Of `content`; of a rejected image: from its header, 0 if none was read."""
    changes: str | None = None
    """Names from CHANGES, joined by commas."""


class Rejected(Exception):  # an outcome, not an error
    def __init__(self, reason: str, header: Header | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.header = header


def validate_image(
    data: bytes, *, settings: ImageSettings, convert: bool = True
) -> ValidationResult:
    """Validate and convert. Raises for no input, except MemoryError.

    convert: False keeps the bytes of every image that decoders can turn into RGB.
    """
    input_hash = blake3(data).digest()
    try:
        content, header, gzipped = _checked_header(data, settings)
        return _checked_pixels(content, header, gzipped, input_hash, settings, converts=convert)
    except Rejected as rejected:
        known = rejected.header
        size = (known.width, known.height) if known else (0, 0)
        extension = SUFFIXES[known.format] if known else ""
        return ValidationResult(rejected.reason, input_hash, b"", input_hash, extension, *size)


def _checked_header(data: bytes, settings: ImageSettings) -> tuple[bytes, Header, bool]:
    """(bytes of the image, its header, whether gzip was taken off). Raises Rejected."""
    if not data:
        raise Rejected("empty")
    if len(data) > MAX_FILE_BYTES:
        raise Rejected("too_large")
    gzipped = data[:2] == b"\x1f\x8b"
    if gzipped:
        data = _unpacked(data)
    try:
        header = read_header(data)
    except HeaderError as error:
        raise Rejected(error.reason) from None
    if header.width * header.height > settings.max_pixels:
        raise Rejected("too_many_pixels", header)
    if header.width < settings.min_side or header.height < settings.min_side:
        raise Rejected("too_small", header)
    if header.fault:
        raise Rejected(header.fault, header)
    return data, header, gzipped


def _unpacked(data: bytes) -> bytes:
    peek, unpacker = zlib.decompressobj(wbits=31), zlib.decompressobj(wbits=31)
    unpacked = bytearray()
    try:
        start = peek.decompress(data, PEEK_BYTES)
        try:
            read_header(start)
        except HeaderError as error:
            # Content that is no image is not unpacked at all.
            if error.reason in ("not_an_image", "other_format"):
                is_cut = len(start) < PEEK_BYTES and not peek.eof
                raise Rejected("bad_gzip" if is_cut else error.reason) from None
        del peek  # it holds a copy of the file
        # In pieces: zlib copies what it does not consume, and a piece may unpack to a thousand.
        for position in range(0, len(data), PIECE_BYTES):
            piece: bytes | memoryview = memoryview(data)[position : position + PIECE_BYTES]
            more = b"-"
            while piece or len(more) == UNPACKED_PIECE_BYTES:
                more = unpacker.decompress(piece, UNPACKED_PIECE_BYTES)
                unpacked += more
                if len(unpacked) > MAX_FILE_BYTES:
                    raise Rejected("too_large")
                if unpacker.eof:
                    return bytes(unpacked)
                piece = unpacker.unconsumed_tail
    except zlib.error:
        pass
    raise Rejected("bad_gzip")


def _checked_pixels(
    data: bytes,
    header: Header,
    gzipped: bool,
    input_hash: bytes,
    settings: ImageSettings,
    *,
    converts: bool,
) -> ValidationResult:
    changes = header.changes if converts else ()
    if converts and is_shrunk(header, settings.short_side):
        # Re-encoding removes all deviations in any case.
        changes = (*header.changes, "short_side")
    elif not converts and header.bit_depth == 16 and header.colour_type == 0:
        raise Rejected("deep_grey", header)
    content, extension = data, SUFFIXES[header.format]
    width, height = header.width, header.height
    try:
        if changes:
            if settings.check == "strict":
                check_pixels(data, header, strict=True)
            shrunk = "short_side" in changes
            short_side = settings.short_side if shrunk else None
            content, extension, width, height = convert(data, header, short_side=short_side)
        elif settings.check != "header" or not header.certain:
            content = check_pixels(data, header, strict=settings.check == "strict")
            if content is not data and not converts:
                raise Rejected("bad_header", header)
            changes = ("metadata",) if content is not data else ()
    except HeaderError as error:
        raise Rejected(error.reason, header) from None
    except UnreadableHeaderError:
        raise Rejected("bad_header", header) from None
    except (MemoryError, Rejected):
        raise
    except Exception:
        # Pillow raises OSError, SyntaxError, ValueError, EOFError ... on broken pixels.
        raise Rejected("bad_pixels", header) from None
    if gzipped:
        changes = ("gzip", *changes)
    content_hash = input_hash if not changes else blake3(content).digest()
    named = ",".join(changes) if changes else None
    return ValidationResult(
        None, input_hash, content, content_hash, extension, width, height, named
    )
