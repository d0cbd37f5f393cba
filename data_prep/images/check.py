"""Check one image: keep it unchanged, convert it, or reject it with a reason (docs/images.md)."""

from __future__ import annotations

import gzip
import io
import zlib
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3
from PIL import Image
from PIL.ImageFile import ImageFile

from vitscale.images.jpeg.markers import has_whole_picture
from vitscale.images.plain import (
    BITS,
    OTHER_FORMATS,
    SUFFIXES,
    UPRIGHT,
    format_of,
    has_opacity,
    open_picture,
    orientation,
    plain,
    tiff_tag,
    upright,
)
from vitscale.runs.data_prep import ImageSettings

FAULTS = dict(
    line.strip().split(": ", 1)
    for line in """\
    empty: zero bytes
    too_large: more than 512 MiB, as stored or unpacked from gzip
    bad_gzip: packed with gzip and broken: cannot be unpacked to the end
    not_an_image: content is no image of a known format
    other_format: another format, such as JPEG 2000; in tars that are indexed also TIFF ...
    no_decoder: HEIC, which is read after: pip install pillow-heif
    bad_header: the header is broken, or of a kind that cannot be decoded
    too_many_pixels: the header claims more than images.max_pixels; nothing was decoded
    too_small: a side is shorter than images.min_side
    deep_grey: 16-bit grey, which decoders clip to white; only for tars that are indexed
    bad_pixels: truncated, damaged, or otherwise not decoded to the last pixel""".splitlines()
)
# These are in the order in which the ledger names them.
CHANGES = """
gzip converted cmyk 16_bit transparency animation exif_rotation short_side
""".split()
MAX_FILE_BYTES = 512 << 20
GZIP = b"\x1f\x8b"
MIN_BYTES = 64
OTHER_STARTS = (
    b"\x00\x00\x01\x00",
    b"8BPS",
    b"\xff\x0a",
    b"II+\0",
    b"MM\0+",
    b"\0\0\0\x0cjP  \r\n\x87\n",
)
LOSSLESS = ("PNG", "TIFF", "BMP", "GIF")
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
    # Unchanged images keep their bytes, so they need no second hash.
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
    format = known_format(found.content)
    if not converts and format in OTHER_FORMATS:
        raise Rejected("other_format")
    if not is_whole(found.content, format):
        raise Rejected("bad_pixels")
    image = open_image(found.content, format)
    if image.width * image.height > settings.max_pixels:
        raise Rejected("too_many_pixels")
    if min(image.size) < settings.min_side:
        raise Rejected("too_small")
    # 16-bit grey would be clipped to white by the decoders of training.
    if not converts and image.mode.startswith("I"):
        raise Rejected("deep_grey")

    # The list of what must change to make the image plain.
    changes: list[str] = []
    turn = UPRIGHT
    if converts:
        # Other formats store the orientation in the header, where reading it costs nothing.
        if format != "PNG" or any(mark in found.content for mark in PNG_EXIF):
            turn = orientation(image)
        changes = _changes(image, found.content, turn, short_side=settings.short_side)
    found.extension = SUFFIXES.get(format, "")
    found.width, found.height = image.size
    # Joined in the order of CHANGES: unpacking comes first.
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
            start = file.read(MIN_BYTES)
            known_format(start)  # content that is no image is not unpacked at all
            content = start + file.read(MAX_FILE_BYTES + 1 - len(start))
    except (OSError, EOFError, zlib.error):
        raise Rejected("bad_gzip") from None
    if len(content) > MAX_FILE_BYTES:
        raise Rejected("too_large")
    return content


def known_format(data: bytes) -> str:
    """Return the format of an image that may be converted. Raises Rejected."""
    format = format_of(data)
    if format is not None:
        return format
    if data.startswith(OTHER_STARTS):
        raise Rejected("other_format")
    raise Rejected("not_an_image")


def open_image(data: bytes, format: str) -> ImageFile:
    """Open without decoding pixels. Raises Rejected."""
    Image.MAX_IMAGE_PIXELS = None  # images.max_pixels takes its place
    try:
        image = open_picture(data, formats=(format,))
    except MemoryError:
        raise
    except ModuleNotFoundError:
        raise Rejected("no_decoder") from None
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
    if format == "WEBP":
        return 8 + int.from_bytes(data[4:8], "little") <= len(data)
    # The others are converted, so that they are decoded to their end.
    return True


def _changes(
    image: ImageFile, data: bytes, turn: int, *, short_side: int | None
) -> list[str]:
    """List the changes needed for a plain 8-bit image; empty: its bytes are kept."""
    depth = max(tiff_tag(image, BITS, (8,)))
    if image.format == "PNG":
        depth = data[PNG_DEPTH]
    # Pillow looks for a second picture, and raises IndexError, struct.error ... if it is broken.
    has_more = True
    with suppress(Exception):
        has_more = getattr(image, "is_animated", False)

    is_needed = {
        "converted": image.format in OTHER_FORMATS,
        "cmyk": image.mode == "CMYK",
        "16_bit": depth > 8,
        "transparency": has_opacity(image),
        # A JPEG with several pictures (MPO) is one to every decoder.
        "animation": image.format != "MPO" and has_more,
        "exif_rotation": turn != UPRIGHT,
        "short_side": short_side is not None and min(image.size) > short_side,
    }
    return [name for name, needed in is_needed.items() if needed]


def _convert(found: CheckedImage, file: ImageFile, short_side: int | None) -> None:
    """Replace content, format and size. Raises what Pillow raises."""
    size = file.size
    # JPEG and lossy WebP lost exactness before, so another loss hardly matters.
    is_lossless_webp = file.format == "WEBP" and b"VP8L" in found.content[:4096]
    is_lossy = file.format not in LOSSLESS and not is_lossless_webp
    if short_side is not None:
        # Rounded to the nearest pixel, in integers, so that all machines agree.
        short = min(size)
        width, height = ((side * short_side + short // 2) // short for side in size)
        size = (width, height)
        # Decodes a JPEG at 1/2, 1/4 or 1/8 if the result has at least twice the size wanted.
        file.draft(file.mode, (2 * width, 2 * height))
    # Transparent and 16-bit pixels are settled first: filters would mix them up.
    image = plain(file)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    image = upright(image, orientation(file))
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
