"""Turning one image into a plain 8-bit RGB or grey one: the written rule of docs/images.md.

Owns: decoding with Pillow, every conversion, re-encoding.
Leaves out: which images are converted (`image_check`).
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageChops

from data_prep.image_header import (
    PNG_GREY,
    PNG_GREY_ALPHA,
    PNG_PALETTE,
    PNG_RGB,
    Header,
)

PILLOW_FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
WHITE = (255, 255, 255)
# libjpeg's limit per side.
JPEG_MAX_SIDE = 65_500
# 16-bit samples are rounded in strips, so that the scratch memory does not grow with the image.
STRIP_ROWS = 256
# EXIF 2.32, tag 274.
ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Unpackers for the high and the low bytes of 16-bit samples: "L" is a name of byte order.
DEEP_COLOUR_BYTES = {"RGB": ("RGB;16B", "RGB;16L"), "RGBA": ("RGBA;16B", "RGBA;16L")}


class UnreadableHeaderError(Exception):
    """Pillow does not take the file, or takes it for another size than the header says."""


def open_image(data: bytes, header: Header) -> Image.Image:
    """Raises UnreadableHeaderError; nothing is decoded yet."""
    # The run's own limit was checked on the header and takes the place of Pillow's.
    Image.MAX_IMAGE_PIXELS = None
    try:
        image = Image.open(io.BytesIO(data), formats=(PILLOW_FORMATS[header.format],))
    except MemoryError:
        raise
    except Exception as error:
        # Pillow raises SyntaxError, ValueError, struct.error, zlib.error ... on broken headers.
        raise UnreadableHeaderError(type(error).__name__) from error
    if image.size != (header.width, header.height):
        raise UnreadableHeaderError(f"size {image.size}")
    return image


def convert(
    data: bytes, header: Header, *, short_side: int | None, jpeg_quality: int
) -> tuple[bytes, str, int, int]:
    """(content, extension, width, height) of the plain image. Raises whatever Pillow raises."""
    image = open_image(data, header)
    size = _target_size(image.size, short_side)
    if size != image.size and header.format == "jpeg":
        # Decodes at 1/2, 1/4 or 1/8 where that leaves twice the size wanted.
        image.draft(image.mode, (2 * size[0], 2 * size[1]))
    image = _plain(image, data, header)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    if header.orientation in ROTATIONS:
        image = image.transpose(ROTATIONS[header.orientation])
    as_jpeg = short_side is not None or (header.format != "png" and header.lossy)
    content, extension = _encoded(image, as_jpeg=as_jpeg, jpeg_quality=jpeg_quality)
    return content, extension, *image.size


def is_shrunk(header: Header, short_side: int | None) -> bool:
    return short_side is not None and min(header.width, header.height) > short_side


def _target_size(size: tuple[int, int], short_side: int | None) -> tuple[int, int]:
    if short_side is None or min(size) <= short_side:
        return size
    short = min(size)
    width, height = ((side * short_side + short // 2) // short for side in size)
    return width, height


def _plain(image: Image.Image, data: bytes, header: Header) -> Image.Image:
    """Decoded, 8 bits, grey or RGB, opaque."""
    if header.bit_depth == 16:
        image, transparent = _rounded(image, data, header)
        if transparent is not None:
            image = _over_white(image, transparent)
    else:
        image.load()
        transparent = _transparency(image, header)
        if transparent is not None:
            image = _over_white(image, transparent)
    if image.mode in ("LA", "RGBA"):
        image = _over_white(image, image.getchannel("A"))
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _over_white(image: Image.Image, opacity: Image.Image) -> Image.Image:
    """Every pixel's colour weighted with its opacity, the rest of the weight white."""
    if image.mode in ("1", "L", "LA"):
        grey = image.getchannel("L") if image.mode == "LA" else image.convert("L")
        plain = Image.new("L", image.size, 255)
        plain.paste(grey, mask=opacity)
        return plain
    plain = Image.new("RGB", image.size, WHITE)
    plain.paste(image.convert("RGB"), mask=opacity)
    return plain


def _transparency(image: Image.Image, header: Header) -> Image.Image | None:
    """Opacity that a tRNS chunk gives an image of up to 8 bits."""
    if not header.transparent:
        return None
    if header.colour_type == PNG_PALETTE:
        opacities = header.transparent[:256].ljust(256, b"\xff")
        indices = Image.frombytes("L", image.size, image.tobytes())
        return indices.point(list(opacities))
    num_samples = 3 if header.colour_type == PNG_RGB else 1
    key = np.frombuffer(header.transparent[: 2 * num_samples], ">u2")
    # The key counts in the file's own depth; the pixels were stretched to 0..255.
    scale = 255 // ((1 << header.bit_depth) - 1)
    opacity = None
    for band, value in zip(_bands(image), key, strict=True):
        table = [255] * 256
        if value < 1 << header.bit_depth:
            table[int(value) * scale] = 0
        differs = band.point(table)
        opacity = differs if opacity is None else ImageChops.lighter(opacity, differs)
    return opacity


def _bands(image: Image.Image) -> tuple[Image.Image, ...]:
    return image.split() if image.mode == "RGB" else (image.convert("L"),)


def _rounded(
    image: Image.Image, data: bytes, header: Header
) -> tuple[Image.Image, Image.Image | None]:
    """The image with every 16-bit sample v as round(v / 257), and its tRNS opacity.

    Pillow itself keeps the high byte of colours. Both bytes are decoded, one pass each.
    """
    if header.colour_type == PNG_GREY_ALPHA:
        # Four bytes a pixel, as in 8-bit RGBA: high and low bytes of both samples at once.
        both = _decoded_as(image, "RGBA")
        high, low = (Image.merge("LA", (both.getchannel(a), both.getchannel(b))) for a, b in PAIRS)
    elif header.colour_type == PNG_GREY:
        # Likewise two bytes a pixel, as in 8-bit grey with alpha.
        both = _decoded_as(image, "LA")
        high, low = both.getchannel("L"), both.getchannel("A")
    else:
        rawmodes = DEEP_COLOUR_BYTES[image.mode]
        high = _decoded_as(image, rawmodes[0])
        low = _decoded_as(open_image(data, header), rawmodes[1])
    transparent = None
    key = np.frombuffer(header.transparent, ">u2") if header.transparent else None
    if key is not None:
        transparent = Image.new("L", image.size, 255)
    rounded = Image.new(high.mode, image.size)
    for top in range(0, image.height, STRIP_ROWS):
        box = (0, top, image.width, min(image.height, top + STRIP_ROWS))
        strip_high = np.asarray(high.crop(box)).astype(np.int16)
        strip_low = np.asarray(low.crop(box)).astype(np.int16)
        # v = 256 high + low and v / 257 = high + (low - high) / 257.
        away = strip_low - strip_high
        strip = strip_high + (away > 128) - (away < -128)
        rounded.paste(Image.fromarray(strip.astype(np.uint8)), box)
        if transparent is not None and key is not None:
            value = strip_high.astype(np.int32) * 256 + strip_low
            same = value == key if value.ndim == 2 else (value == key).all(axis=2)
            transparent.paste(Image.fromarray(np.where(same, 0, 255).astype(np.uint8)), box)
    return rounded, transparent


# Bands of "RGBA" that hold grey and alpha: first the high bytes, then the low ones.
PAIRS = (("R", "B"), ("G", "A"))


def _decoded_as(image: Image.Image, rawmode: str) -> Image.Image:
    """Decode the samples' bytes under another name of the same number of bits per pixel."""
    image._mode = rawmode.partition(";")[0]
    tile = image.tile[0]  # type: ignore[attr-defined]
    image.tile = [tile._replace(args=rawmode)]  # type: ignore[attr-defined]
    image.info.pop("transparency", None)
    image.load()
    return image


def _encoded(image: Image.Image, *, as_jpeg: bool, jpeg_quality: int) -> tuple[bytes, str]:
    # Nothing but pixels goes along: no profile, no text, no resolution, no rotation.
    image.info = {}
    file = io.BytesIO()
    if as_jpeg and max(image.size) <= JPEG_MAX_SIDE:
        image.save(file, format="JPEG", quality=jpeg_quality, subsampling=0)
        return file.getvalue(), "jpg"
    image.save(file, format="PNG")
    return file.getvalue(), "png"
