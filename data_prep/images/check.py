"""Check one image: keep it unchanged, convert it, or reject it with a reason (docs/images.md)."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image
from PIL.ImageFile import ImageFile

from vitscale.images.jpeg.markers import has_whole_picture
from vitscale.images.plain import (
    SUFFIXES,
    UPRIGHT,
    has_opacity,
    open_picture,
    orientation,
    plain,
    upright,
)
from vitscale.runs.data_prep import ImageSettings

FAULTS = {
    "empty": "zero bytes",
    "too_large": "more than 512 MiB, as stored or unpacked from gzip",
    "bad_gzip": "packed with gzip and broken: cannot be unpacked to the end",
    "not_an_image": "content is no image of a known format",
    "other_format": "an image of another format: GIF, BMP, TIFF, AVIF ...",
    "bad_header": "the header is broken, or of a kind that cannot be decoded",
    "too_many_pixels": "the header claims more than images.max_pixels; nothing was decoded",
    "too_small": "a side is shorter than images.min_side",
    "deep_grey": "16-bit grey, which decoders clip to white; only for tars that are indexed",
    "bad_pixels": "truncated, damaged, or otherwise not decoded to the last pixel",
}
# In the order in which the ledger names them.
CHANGES = (
    "gzip",
    "cmyk",
    "16_bit",
    "transparency",
    "animation",
    "exif_rotation",
    "short_side",
)
MAX_FILE_BYTES = 512 << 20
GZIP = b"\x1f\x8b"
START_BYTES = 64
OTHER_FORMATS = (
    b"GIF8",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"\x00\x00\x01\x00",
    b"8BPS",
    b"\xff\x0a",
)
OTHER_BRANDS = (
    b"ftypavif",
    b"ftypavis",
    b"ftypheic",
    b"ftypheix",
    b"ftypmif1",
    b"jP  \r\n\x87\n",
)
PNG_DEPTH = 24
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
# Without one of these, Pillow would decode a whole PNG in search of its orientation.
PNG_EXIF = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# libjpeg's limit per side.
JPEG_MAX_SIDE = 65_500
JPEG_QUALITY = 95


@dataclass(slots=True)
class CheckedImage:
    """The outcome of checking one input."""

    reason: str | None
    """None: usable; otherwise a key of FAULTS."""
    input_hash: bytes
    content: bytes = b""
    """Bytes to store: the object given, if nothing was changed; empty if rejected."""
    content_hash: bytes = b""
    extension: str = ""
    """jpg, png or webp, by content."""
    width: int = 0
    height: int = 0
    changes: str | None = None
    """Names from CHANGES, joined by commas."""


class Rejected(Exception):
    """Rejection of an input; its text is a key of FAULTS."""


def check_image(
    data: bytes, *, settings: ImageSettings, convert: bool = True
) -> CheckedImage:
    """Check and convert. Raises for no input, except MemoryError.

    convert: False keeps the bytes of every image that decoders can turn into RGB.
    """
    found = CheckedImage(None, blake3(data).digest())
    try:
        _check(found, data, settings, converts=convert)
    except Rejected as reason:
        return CheckedImage(str(reason), found.input_hash)
    found.content_hash = found.input_hash
    if found.changes:
        found.content_hash = blake3(found.content).digest()
    return found


def _check(
    found: CheckedImage, data: bytes, settings: ImageSettings, *, converts: bool
) -> None:
    """Fill in content, format, size and changes. Raises Rejected."""
    if not data:
        raise Rejected("empty")
    if len(data) > MAX_FILE_BYTES:
        raise Rejected("too_large")

    # The first bytes and the header reject before pixels are decoded, which costs most.
    is_packed = data.startswith(GZIP)
    found.content = _unpacked(data) if is_packed else data
    format = format_of(found.content)
    if not is_whole(found.content, format):
        raise Rejected("bad_pixels")
    image = open_image(found.content, format)
    if image.width * image.height > settings.max_pixels:
        raise Rejected("too_many_pixels")
    if min(image.size) < settings.min_side:
        raise Rejected("too_small")
    if not converts and image.mode.startswith("I"):
        raise Rejected("deep_grey")

    # What must change to make the image plain.
    changes: list[str] = []
    turn = UPRIGHT
    if converts:
        if format != "PNG" or any(mark in found.content for mark in PNG_EXIF):
            turn = orientation(image)
        changes = _changes(image, found.content, turn, short_side=settings.short_side)
    found.extension = SUFFIXES[format]
    found.width, found.height = image.size
    found.changes = ",".join(["gzip"] * is_packed + changes) or None

    # Only decoding finds damage between the header and the end.
    try:
        if settings.check == "strict" and format == "JPEG":
            decode_strictly(found.content)
        elif settings.check != "header" and not changes:
            if format == "JPEG" and image.mode in ("L", "RGB"):
                # This decodes all coded data, where faults appear. The rest is arithmetic that
                # cannot fail: an eighth of the size, in grey, is enough and saves 40 % of the time.
                image.draft("L", (1, 1))
            image.load()
        if changes:
            _convert(
                found,
                image,
                turn,
                settings.short_side if "short_side" in changes else None,
            )
    except MemoryError:
        raise
    except Exception:
        # Pillow raises OSError, SyntaxError, ValueError, EOFError ... on broken pixels.
        raise Rejected("bad_pixels") from None


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as file:
            start = file.read(START_BYTES)
            format_of(start)  # content that is no image is not unpacked at all
            content = start + file.read(MAX_FILE_BYTES + 1 - len(start))
    except (OSError, EOFError, zlib.error):
        raise Rejected("bad_gzip") from None
    if len(content) > MAX_FILE_BYTES:
        raise Rejected("too_large")
    return content


def format_of(data: bytes) -> str:
    """Return Pillow's name of the format, by the first bytes. Raises Rejected."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    is_other = data.startswith(OTHER_FORMATS) or data[4:12] in OTHER_BRANDS
    raise Rejected("other_format" if is_other else "not_an_image")


def open_image(data: bytes, format: str) -> ImageFile:
    """Open without decoding pixels. Raises Rejected."""
    Image.MAX_IMAGE_PIXELS = None  # images.max_pixels takes its place
    try:
        image = open_picture(data, formats=(format,))
    except MemoryError:
        raise
    except Exception:
        # Pillow raises SyntaxError, ValueError, struct.error, zlib.error ... on broken headers.
        raise Rejected("bad_header") from None
    assert isinstance(image, ImageFile)
    return image


def is_whole(data: bytes, format: str) -> bool:
    """Return True if the end of the picture is present; anything may follow it."""
    if format == "JPEG":
        return has_whole_picture(data)
    if format == "PNG":
        return data.rfind(PNG_END) >= 0
    return 8 + int.from_bytes(data[4:8], "little") <= len(data)


def _changes(
    image: ImageFile, data: bytes, turn: int, *, short_side: int | None
) -> list[str]:
    """List the changes needed for a plain 8-bit image; empty: its bytes are kept."""
    is_needed = {
        "cmyk": image.mode == "CMYK",
        "16_bit": image.format == "PNG" and data[PNG_DEPTH] == 16,
        "transparency": has_opacity(image),
        # A JPEG with several pictures (MPO) is one to every decoder.
        "animation": image.format in ("PNG", "WEBP")
        and getattr(image, "is_animated", False),
        "exif_rotation": turn != UPRIGHT,
        "short_side": short_side is not None and min(image.size) > short_side,
    }
    return [name for name, needed in is_needed.items() if needed]


def _convert(
    found: CheckedImage, file: ImageFile, turn: int, short_side: int | None
) -> None:
    """Replace content, format and size. Raises what Pillow raises."""
    size = file.size
    is_lossless_webp = file.format == "WEBP" and b"VP8L" in found.content[:4096]
    is_lossy = file.format != "PNG" and not is_lossless_webp
    if short_side is not None:
        short = min(size)
        width, height = ((side * short_side + short // 2) // short for side in size)
        size = (width, height)
        # Decodes a JPEG at 1/2, 1/4 or 1/8 if the result has at least twice the size wanted.
        file.draft(file.mode, (2 * width, 2 * height))
    image = plain(file)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    image = upright(image, turn)
    image.info = {}  # only pixels: no profile, text, resolution or rotation

    # A picture that is lossy already, or is made smaller, need not be stored exactly.
    format = "PNG"
    options: dict[str, int] = {}
    if (is_lossy or short_side is not None) and max(image.size) <= JPEG_MAX_SIDE:
        format = "JPEG"
        options = {"quality": JPEG_QUALITY, "subsampling": 0}
    encoded = io.BytesIO()
    image.save(encoded, format, **options)
    found.content = encoded.getvalue()
    found.extension = SUFFIXES[format]
    found.width, found.height = image.size


def decode_strictly(data: bytes) -> None:
    """Raise ValueError if libjpeg-turbo would repair, guess or skip anything.

    All coefficients are decoded at any output size, so an eighth of the size is enough. CMYK and
    YCCK are decoded as CMYK, other colour spaces as grey.
    """
    import simplejpeg

    space = simplejpeg.decode_jpeg_header(data)[2]
    target = "CMYK" if space in ("CMYK", "YCCK") else "GRAY"
    simplejpeg.decode_jpeg(
        data, colorspace=target, min_height=1, min_width=1, strict=True
    )
