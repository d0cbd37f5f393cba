"""Convert one image to plain 8-bit RGB or grey, by the rules of docs/images.md.

Owns: decoding with Pillow, every conversion, re-encoding.
Leaves out: which images are converted (`check`).
"""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image, ImageChops
from PIL.ImageFile import ImageFile

from data_prep.images.header import (
    PNG_GREY,
    PNG_GREY_ALPHA,
    PNG_PALETTE,
    PNG_RGB,
    Header,
    critical_chunks,
)
from vitscale.images.orientation import upright

PILLOW_FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
WHITE = (255, 255, 255)
# libjpeg's limit per side.
JPEG_MAX_SIDE = 65_500
JPEG_QUALITY = 95
# 16-bit samples are rounded in strips, so that the scratch memory does not grow with the image.
STRIP_ROWS = 256
# Unpackers for the high and the low bytes of 16-bit samples: "L" is a name of byte order.
DEEP_COLOUR_BYTES = {"RGB": ("RGB;16B", "RGB;16L"), "RGBA": ("RGBA;16B", "RGBA;16L")}


class UnreadableHeaderError(Exception):
    """Pillow cannot open the file, or finds another size than the header."""


def open_image(data: bytes, header: Header) -> ImageFile:
    """Open without decoding pixels. Raises UnreadableHeaderError."""
    # The run's own limit, checked on the header, replaces Pillow's.
    Image.MAX_IMAGE_PIXELS = None
    try:
        image = Image.open(io.BytesIO(data), formats=(PILLOW_FORMATS[header.format],))
    except MemoryError:
        raise
    except Exception as error:
        # Pillow raises SyntaxError, ValueError, struct.error, zlib.error ... on broken headers.
        raise UnreadableHeaderError(type(error).__name__) from error
    assert isinstance(image, ImageFile)
    if image.size != (header.width, header.height):
        raise UnreadableHeaderError(f"size {image.size}")
    return image


def check_pixels(data: bytes, header: Header, *, strict: bool = False) -> bytes:
    """Decode everything. Returns `data`, or a PNG without the extra chunks that readers reject.

    strict: a JPEG must not even make its decoder warn.
    Raises UnreadableHeaderError, HeaderError, or whatever decoders raise on damaged pixels.
    """
    if header.format == "jpeg" and strict:
        open_image(data, header)
        # Pillow uses the same library, but ignores its warnings.
        decode_strictly(data)
        return data
    if header.format == "jpeg" and header.certain:
        image = open_image(data, header)
        if image.mode in ("L", "RGB"):
            # This decodes all coded data, where faults appear. The rest is arithmetic that cannot
            # fail: an eighth of the size, in grey, is enough and saves 40 % of the time.
            image.draft("L", (1, 1))
        image.load()
        return data
    if header.format != "png":
        open_image(data, header).load()
        return data
    plain = critical_chunks(data)
    try:
        open_image(data, header).load()
    except MemoryError:
        raise
    except Exception:
        repaired = b"".join(plain)
        open_image(repaired, header).load()
        return repaired
    return data


def convert(data: bytes, header: Header, *, short_side: int | None) -> tuple[bytes, str, int, int]:
    """(content, extension, width, height) of the converted image. Raises what Pillow raises."""
    if header.format == "png":
        data = b"".join(critical_chunks(data))
    file = open_image(data, header)
    size = _target_size(file.size, short_side)
    if size != file.size and header.format == "jpeg":
        # Decodes at 1/2, 1/4 or 1/8 if the result has at least twice the size wanted.
        file.draft(file.mode, (2 * size[0], 2 * size[1]))
    image = _plain(file, data, header)
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    image = upright(image, header.orientation)
    as_jpeg = short_side is not None or (header.format != "png" and header.lossy)
    content, extension = _encoded(image, as_jpeg=as_jpeg)
    return content, extension, *image.size


def is_shrunk(header: Header, short_side: int | None) -> bool:
    return short_side is not None and min(header.width, header.height) > short_side


def _target_size(size: tuple[int, int], short_side: int | None) -> tuple[int, int]:
    if short_side is None or min(size) <= short_side:
        return size
    short = min(size)
    width, height = ((side * short_side + short // 2) // short for side in size)
    return width, height


def _plain(file: ImageFile, data: bytes, header: Header) -> Image.Image:
    """Decoded, 8 bits, grey or RGB, opaque."""
    if header.bit_depth == 16:
        image, opacity = _rounded(file, data, header)
    else:
        file.load()
        image, opacity = file, _opacity(file, header)
    if opacity is None and image.mode in ("LA", "RGBA"):
        opacity = image.getchannel("A")
    if opacity is not None:
        return _over_white(image, opacity)
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _over_white(image: Image.Image, opacity: Image.Image) -> Image.Image:
    """Blend over white, each pixel by its opacity."""
    if image.mode in ("1", "L", "LA"):
        grey = image.getchannel("L") if image.mode == "LA" else image.convert("L")
        plain = Image.new("L", image.size, 255)
        plain.paste(grey, mask=opacity)
        return plain
    plain = Image.new("RGB", image.size, WHITE)
    plain.paste(image.convert("RGB"), mask=opacity)
    return plain


def _opacity(image: Image.Image, header: Header) -> Image.Image | None:
    """Opacity of an image of up to 8 bits by its tRNS chunk."""
    if not header.transparent:
        return None
    if header.colour_type == PNG_PALETTE:
        opacities = header.transparent[:256].ljust(256, b"\xff")
        indices = Image.frombytes("L", image.size, image.tobytes())
        return indices.point(list(opacities))
    key = _transparent_key(header)
    # The key is in the file's own depth; the pixels were scaled to 0..255.
    scale = 255 // ((1 << header.bit_depth) - 1)
    opacity = None
    for band, value in zip(_bands(image), key, strict=True):
        table = [255] * 256
        if value < 1 << header.bit_depth:
            table[value * scale] = 0
        differs = band.point(table)
        opacity = differs if opacity is None else ImageChops.lighter(opacity, differs)
    return opacity


def _transparent_key(header: Header) -> tuple[int, ...]:
    """The one colour that a tRNS chunk makes transparent. Raises struct.error on a short chunk."""
    return struct.unpack_from(">HHH" if header.colour_type == PNG_RGB else ">H", header.transparent)


def _bands(image: Image.Image) -> tuple[Image.Image, ...]:
    return image.split() if image.mode == "RGB" else (image.convert("L"),)


def _rounded(
    file: ImageFile, data: bytes, header: Header
) -> tuple[Image.Image, Image.Image | None]:
    """The image with every 16-bit sample v as round(v / 257), and its tRNS opacity."""
    high, low = _high_and_low(file, data, header)
    key = _transparent_key(header) if header.transparent else None
    opacity = None if key is None else Image.new("L", high.size, 255)
    rounded = Image.new(high.mode, high.size)
    for top in range(0, high.height, STRIP_ROWS):
        box = (0, top, high.width, min(high.height, top + STRIP_ROWS))
        strip_high = np.asarray(high.crop(box)).astype(np.int32)
        strip_low = np.asarray(low.crop(box)).astype(np.int32)
        # v = 256 high + low and v / 257 = high + (low - high) / 257.
        away = strip_low - strip_high
        strip = strip_high + (away > 128) - (away < -128)
        rounded.paste(Image.fromarray(strip.astype(np.uint8)), box)
        if opacity is not None:
            same = 256 * strip_high + strip_low == np.asarray(key)
            if same.ndim == 3:
                same = same.all(axis=2)
            opacity.paste(Image.fromarray(np.where(same, 0, 255).astype(np.uint8)), box)
    return rounded, opacity


def _high_and_low(file: ImageFile, data: bytes, header: Header) -> tuple[Image.Image, Image.Image]:
    """High and low bytes of 16-bit samples as two images; Pillow would drop the low ones."""
    if header.colour_type == PNG_GREY:
        # Two bytes a pixel, as in 8-bit grey with alpha.
        both = _decoded_as(file, "LA")
        return both.getchannel("L"), both.getchannel("A")
    if header.colour_type == PNG_GREY_ALPHA:
        # Four bytes a pixel, as in 8-bit RGBA: high, low, high, low.
        grey_high, grey_low, alpha_high, alpha_low = _decoded_as(file, "RGBA").split()
        high = Image.merge("LA", (grey_high, alpha_high))
        return high, Image.merge("LA", (grey_low, alpha_low))
    first, second = DEEP_COLOUR_BYTES[file.mode]
    return _decoded_as(file, first), _decoded_as(open_image(data, header), second)


def _decoded_as(file: ImageFile, rawmode: str) -> Image.Image:
    """Decode the samples' bytes as another mode with the same number of bits per pixel."""
    file._mode = rawmode.partition(";")[0]
    file.tile = [tile._replace(args=rawmode) for tile in file.tile]
    file.load()
    return file


def _encoded(image: Image.Image, *, as_jpeg: bool) -> tuple[bytes, str]:
    # Only pixels: no profile, text, resolution or rotation.
    image.info = {}
    file = io.BytesIO()
    if as_jpeg and max(image.size) <= JPEG_MAX_SIDE:
        image.save(file, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
        return file.getvalue(), "jpg"
    image.save(file, format="PNG")
    return file.getvalue(), "png"


def decode_strictly(data: bytes) -> None:
    """Check that a JPEG decodes without any warning.

    Raises ValueError if libjpeg-turbo would repair, guess or skip anything.

    All coefficients are decoded at any output size, so an eighth of the size is enough. CMYK and
    YCCK are decoded as CMYK, other colour spaces as grey.
    """
    import simplejpeg

    space = simplejpeg.decode_jpeg_header(data)[2]
    target = "CMYK" if space in ("CMYK", "YCCK") else "GRAY"
    simplejpeg.decode_jpeg(data, colorspace=target, min_height=1, min_width=1, strict=True)
