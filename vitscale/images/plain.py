"""Turn decoded images into upright, opaque grey or RGB with 8 bits per sample.

The rules of data preparation (docs/images.md), which unprepared images follow too.
"""

from __future__ import annotations

import io
import logging
import struct
import warnings
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

# EXIF 2.32, tag 274.
TAG = 274
UPRIGHT = 1
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The formats that are trained on, by Pillow's names.
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
# Data preparation converts these, and commands that read files read them. The last has a decoder in
# the package pillow-heif alone.
OTHER_FORMATS = ("AVIF", "BMP", "GIF", "TIFF", "HEIF")
ALL_FORMATS = (*SUFFIXES, *OTHER_FORMATS)
STARTS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
# Numbers of TIFF 6.0.
BITS = 258
PHOTOMETRIC = 262
EXIF_GPS_INTEROP = (34665, 34853, 40965)
KINDS_OF_BYTES = (1, 2, 7)
# Pillow takes 240 bytes for each number of a list, and libtiff memory for a whole tile. A picture
# of 100 megapixels has 65,536 strips at most, and a tile of 4,096 px a side is a large one.
MAX_NUMBERS = 1 << 18
MAX_TILE_PIXELS = 1 << 26
# Largest number of pixels of a grey picture.
MAX_PIXELS = 1 << 28
GREY = ("1", "L", "LA", "La")
# Bits per sample of a PNG without a palette or an alpha channel, by Pillow's name of its rows.
PNG_DEPTHS = {"1": 1, "L;2": 2, "L;4": 4, "L": 8, "RGB": 8, "I;16B": 16, "RGB;16B": 16}
# Errors of Pillow on broken bytes, besides OSError and ValueError.
PILLOW_ERRORS = (
    ArithmeticError,
    AssertionError,
    EOFError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    struct.error,
    zlib.error,
)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8."""
    try:
        found = image.getexif().get(TAG, UPRIGHT)
    except (OSError, ValueError, *PILLOW_ERRORS):
        return UPRIGHT  # broken metadata does not make an image unreadable
    if isinstance(found, int) and found in TURNS:
        return found
    return UPRIGHT


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image by its EXIF orientation; 1 returns the image itself."""
    if orientation in TURNS:
        return image.transpose(TURNS[orientation])
    return image


def format_of(data: bytes) -> str | None:
    """Return Pillow's name of one of our formats, by the first bytes; None for any other."""
    for start, format in STARTS.items():
        if data.startswith(start):
            return format
    # RIFF is a container for sound and video as well.
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    # ISO 23008-12: the names of all standards that the file follows.
    if data[4:8] == b"ftyp":
        if b"avif" in data[8:64]:
            return "AVIF"
        return "HEIF"
    return None


def open_picture(data: bytes, *, formats: Sequence[str]) -> Image.Image:
    """Open an image of one of Pillow's formats without decoding it.

    Raises what Pillow raises, ValueError for a TIFF that it would read wrongly, and
    ModuleNotFoundError for a format whose decoder is not installed.
    """
    _quiet_pillow()
    format = format_of(data)
    if format != "HEIF":
        # The package pillow-heif adds the name, so Pillow does not know it before that.
        formats = [name for name in formats if name != "HEIF"]
    elif format in formats:
        _add_heif()
    if format == "TIFF":
        _refuse_long_lists(data)
    image = Image.open(io.BytesIO(data), formats=tuple(formats))
    if format == "TIFF":
        _refuse_wrong_pixels(image)
    return image


@cache
def _add_heif() -> None:
    from pillow_heif import register_heif_opener

    register_heif_opener()


def tiff_tag(image: Image.Image, tag: int, default: Any) -> Any:
    """Return the value of a tag; the default where it is missing, and for other formats."""
    return getattr(image, "tag_v2", {}).get(tag, default)


def _refuse_long_lists(data: bytes) -> None:
    """Raise ValueError if the first page of a TIFF has lists that take gigabytes as Python numbers.

    Raises struct.error where its tags end too early.
    """
    # Bytes 4 to 7 say where the first folder of tags begins; the loop below adds others.
    order = ">" if data.startswith(b"MM") else "<"
    folders = [*struct.unpack_from(f"{order}L", data, 4)]
    for start in folders:
        (num_tags,) = struct.unpack_from(f"{order}H", data, start)
        tags = data[start + 2 : start + 2 + 12 * num_tags]
        # Each tag has a number, a kind and a count of its values, and one of them or their place.
        for tag, kind, count, place in struct.iter_unpack(f"{order}HHLL", tags):
            if count > MAX_NUMBERS and kind not in KINDS_OF_BYTES:
                raise ValueError(f"a TIFF with a list of {count:,} numbers")
            # Pillow reads these folders whole. They may name each other in a circle.
            if tag in EXIF_GPS_INTEROP and len(folders) < 9:
                folders.append(place)


def _refuse_wrong_pixels(image: Image.Image) -> None:
    """Raise ValueError for a TIFF that Pillow would turn into other pixels than it has."""
    if image.mode in ("I", "F"):
        raise ValueError(
            "samples of 32 bits or with a sign: nothing says which is white"
        )

    is_deep = max(tiff_tag(image, BITS, (1,))) > 8
    if is_deep and tiff_tag(image, 284, 1) == 2:
        raise ValueError("16-bit colours in separate planes")

    tile = tiff_tag(image, 322, 1) * tiff_tag(image, 323, 1)
    if tile > MAX_TILE_PIXELS:
        raise ValueError(f"a tile of {tile:,} pixels; at most {MAX_TILE_PIXELS:,}")


@cache
def _quiet_pillow() -> None:
    """Hide Pillow's warnings, of broken EXIF and the like: one per image would fill a log."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def has_opacity(image: Image.Image) -> bool:
    """Whether pixels may be transparent: by an alpha channel, a palette entry or a colour."""
    return (
        image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    )


def plain(image: Image.Image) -> Image.Image:
    """Return 8-bit L or RGB: 16-bit grey v as round(v / 257), transparent pixels over white.

    image: not loaded yet if it comes from a file, so that its samples can still be read as stored.
    """
    keyed = _keyed_pixels(image)
    # A TIFF turns itself upright now, and then has no orientation any more.
    image.load()
    if keyed is not None:
        pixels = np.array(_opaque(image))
        pixels[keyed] = 255
        return Image.fromarray(pixels)
    if not has_opacity(image):
        return _opaque(image)

    mode = _plain_mode(image)
    over = image.convert("LA" if mode == "L" else "RGBA")
    white = Image.new(mode, image.size, "white")
    white.paste(over.convert(mode), mask=over.getchannel("A"))
    return white


def _plain_mode(image: Image.Image) -> str:
    if image.mode in GREY:
        return "L"
    return "RGB"


def _opaque(image: Image.Image) -> Image.Image:
    """Return 8-bit L or RGB, whatever is transparent."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip to white
        # The brightest value that the stored number of bits can have.
        white = (1 << max(tiff_tag(image, BITS, (16,)))) - 1
        levels = (np.asarray(image) * 255.0 / white).round().clip(0, 255)
        # Pillow inverts pictures whose 0 is white, but not these.
        if tiff_tag(image, PHOTOMETRIC, 1) == 0:
            levels = 255 - levels
        return Image.fromarray(levels.astype(np.uint8))
    mode = _plain_mode(image)
    if image.mode == mode:
        return image
    return image.convert(mode)


def _keyed_pixels(image: Image.Image) -> np.ndarray | None:
    """Mark the pixels of the one colour that a PNG calls transparent, bool [H, W].

    None if it names no such colour. Samples are compared with it as stored, as libpng does; Pillow
    compares scaled grey, and the high bytes of 16-bit colours with the low bytes of the key.
    """
    key = image.info.get("transparency")
    if not isinstance(image, PngImageFile) or not image.tile:
        return None
    depth = PNG_DEPTHS.get(str(image.tile[0][3]))
    if depth is None or not isinstance(key, int | tuple):
        return None

    if depth == 16 and image.mode == "RGB":
        low = _low_bytes(image)
        samples = np.asarray(image).astype(np.uint16) << 8 | low
    elif depth < 8:
        # Pillow scales grey of fewer bits to 0..255, and leaves the numbers of a palette.
        scale = 255 // ((1 << depth) - 1) if image.mode == "L" else 1
        samples = np.asarray(image).astype(np.uint8) // scale
    else:
        samples = np.asarray(image)
    # Bits above the depth of the picture do not count.
    stored_key = np.array(key) & ((1 << depth) - 1)

    same = np.asarray(samples == stored_key)
    if same.ndim == 3:
        return np.asarray(same.all(axis=2))
    return same


def _low_bytes(image: PngImageFile) -> np.ndarray:
    """Return the low bytes of the samples of a 16-bit RGB PNG, uint8 [H, W, 3]."""
    # Pillow goes on reading from this position, which is restored at the end.
    file = image.fp
    assert file is not None
    position = file.tell()
    file.seek(0)
    with Image.open(file, formats=("PNG",)) as again:
        assert isinstance(again, PngImageFile)
        # Read as if the low byte came first, Pillow keeps the one that is stored last.
        again.tile = [again.tile[0]._replace(args="RGB;16L")]
        low = np.array(again)
    file.seek(position)
    return low


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """Return the pixels of an image that was not prepared as decoders do, uint8 [H, W, 3]."""
    return np.array(upright(plain(image), orientation(image)).convert("RGB"))


class GreyPicture(NamedTuple):
    pixels: np.ndarray
    """uint8, upright, transparent pixels white."""
    short_side: int
    """Of the image itself, in pixels."""


def grey_picture(content: bytes, *, side: int) -> GreyPicture | None:
    """Return the picture of an encoded image at side x side pixels.

    None if the image cannot be decoded or has more than MAX_PIXELS.
    """
    # MAX_PIXELS replaces Pillow's own limit.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with open_picture(content, formats=ALL_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            short_side = min(image.size)
            # JPEG decoders downscale by 2, 4 or 8 at almost no cost. The last block may be partly
            # filled, hence the box, which is the true extent of the picture.
            drafted = image.draft("L", (2 * side, 2 * side))
            grey = plain(image).convert("L")
            # The orientation is read before the file is closed, and applied to the small picture.
            turn = orientation(image)
            small = grey.resize(
                (side, side),
                Image.Resampling.BILINEAR,
                box=drafted[1] if drafted else None,
                reducing_gap=3.0,
            )
    except MemoryError:
        raise
    except Exception:
        # Pillow raises OSError, SyntaxError, ValueError, struct.error ... on broken content.
        return None

    return GreyPicture(np.asarray(upright(small, turn)), short_side)
