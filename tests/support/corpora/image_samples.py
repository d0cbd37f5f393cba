"""Make images of every kind, with Pillow or chunk by chunk."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw, ImageFilter

# Neither is a multiple of 8: the last blocks of a JPEG, and all rows of Adam7, are cut off.
HEIGHT = 19
WIDTH = 23


def pixels(channels: int, *, dtype: type = np.uint8, seed: int = 0) -> np.ndarray:
    """Random pixels: no two pixels or channels are alike."""
    high = np.iinfo(dtype).max
    rng = np.random.default_rng(seed)
    return rng.integers(0, high + 1, (HEIGHT, WIDTH, channels), dtype=dtype)


def noise(width: int, height: int, *, seed: int) -> np.ndarray:
    """RGB pixels of another picture for each seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 255, (height, width, 3), dtype=np.uint8)


def smooth(channels: int = 3) -> np.ndarray:
    """A smooth image, which JPEG changes little."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    # Slopes that differ by channel and direction, so that no mix-up of them looks the same.
    planes = [
        60 + 5 * x + 2 * y,
        200 - 4 * x + y,
        40 + 8 * y,
        30 + 2 * x + 3 * y,
    ]
    pixels = np.stack(planes[:channels], axis=2)
    return pixels.astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, format: str, **options) -> bytes:
    if isinstance(image, np.ndarray):
        # Pillow wants grey pixels without a third axis.
        image = Image.fromarray(image.squeeze())
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def photograph(width: int, height: int) -> Image.Image:
    """An image like a photograph: smooth shading, edges, some noise."""
    y, x = np.mgrid[0:height, 0:width]
    red = 128 + 100 * np.sin(x / 37 + y / 53)
    green = 128 + 90 * np.cos(x / 23 - y / 91)
    blue = 60 + 150 * (x / width) * (y / height)
    pixels = np.stack([red, green, blue], axis=-1)
    rng = np.random.default_rng(0)
    pixels += rng.normal(0, 8, pixels.shape)
    pixels = pixels.clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)

    # Two shapes without left-right or up-down symmetry: a flip shows.
    draw = ImageDraw.Draw(image)
    ellipse = (width * 0.2, height * 0.3, width * 0.5, height * 0.8)
    draw.ellipse(ellipse, fill=(230, 40, 30))
    rectangle = (width * 0.6, height * 0.1, width * 0.9, height * 0.5)
    draw.rectangle(rectangle, fill=(20, 60, 200))
    # A lens blurs edges; sharp ones would compress unlike a photograph's.
    return image.filter(ImageFilter.GaussianBlur(2))


def decoded(data: bytes, mode: str | None = None) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    if mode:
        image = image.convert(mode)
    return np.asarray(image)


def rotated(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation  # EXIF's number of the tag Orientation
    return exif


def chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    colour: int = 2,
    rows: bytes = b"",
    packed: bytes | None = None,
    before: bytes = b"",
    after: bytes = b"",
    interlace: int = 0,
) -> bytes:
    """A PNG of rows that already begin with their filter bytes."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    # `packed`: a stream that zlib itself would not write.
    if packed is None:
        packed = zlib.compress(rows)
    # Other chunks may be on both sides of the pixels.
    parts = [
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", header),
        before,
        chunk(b"IDAT", packed),
        after,
        chunk(b"IEND", b""),
    ]
    return b"".join(parts)


def unfiltered(samples: np.ndarray) -> bytes:
    """Rows of samples, big-endian, each after filter byte 0."""
    if samples.dtype == np.uint16:
        samples = samples.astype(">u2")
    return b"".join(b"\0" + row.tobytes() for row in samples)


def deep_png(samples: np.ndarray, **options) -> bytes:
    """16-bit grey, grey with alpha, RGB or RGBA, by the number of channels."""
    height, width, channels = samples.shape
    # PNG's numbers: bit 1 is colour, bit 2 is alpha.
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = unfiltered(samples)
    return png(width, height, depth=16, colour=colour, rows=rows, **options)


# Of each pass of an interlaced PNG: first row and column, and the steps (PNG specification, 8.2).
ADAM7 = yaml.safe_load("""
- [0, 0, 8, 8]
- [0, 4, 8, 8]
- [4, 0, 8, 4]
- [0, 2, 4, 4]
- [2, 0, 4, 2]
- [0, 1, 2, 2]
- [1, 0, 2, 1]
""")


def adam7(samples: np.ndarray) -> bytes:
    """Rows of the seven passes of an interlaced PNG."""
    passes = [samples[y::dy, x::dx] for y, x, dy, dx in ADAM7]
    # A pass without a pixel has no rows at all, not empty ones.
    return b"".join(unfiltered(part) for part in passes if part.size)


# Of each: the image, its format, and options of Pillow.
SAMPLES: dict[str, list[Any]] = yaml.safe_load("""
jpeg: [rgb, JPEG]
jpeg smooth: [smooth, JPEG]
jpeg progressive: [rgb, JPEG, {progressive: true}]
jpeg progressive smooth: [smooth, JPEG, {progressive: true}]
jpeg restarts: [rgb, JPEG, {restart_marker_blocks: 2}]
jpeg 4:4:4: [rgb, JPEG, {subsampling: 0}]
jpeg rgb: [rgb, JPEG, {keep_rgb: true}]
jpeg cmyk: [cmyk, JPEG]
png: [rgb, PNG]
png smooth: [smooth, PNG]
png palette: [palette, PNG]
png palette 4 bits: [palette, PNG, {bits: 4}]
png palette transparent: [palette, PNG, {transparency: 3}]
png rgba: [rgba, PNG]
webp: [rgb, WEBP]
webp smooth: [smooth, WEBP]
webp lossless: [rgb, WEBP, {lossless: true}]
webp rgba: [rgba, WEBP]
webp lossless rgba: [rgba, WEBP, {lossless: true}]
""")


def small_samples() -> dict[str, bytes]:
    """Valid images of every common kind, by name."""
    random = pixels(3)
    rgb = Image.fromarray(random)
    rgba = Image.fromarray(pixels(4))
    # Two frames that differ everywhere: only the first one is the image.
    second = Image.fromarray(255 - random)
    frames = {"save_all": True, "append_images": [second]}
    images = {
        "rgb": rgb,
        "rgba": rgba,
        "smooth": Image.fromarray(smooth()),
        "cmyk": pixels_as_cmyk(),
        "palette": rgb.quantize(16),
    }
    samples = {}
    for name, (image, format, *options) in SAMPLES.items():
        samples[name] = encoded(images[image], format, **dict(*options))

    # Those that need more than an option: EXIF, a profile, frames, or what Pillow cannot write.
    return samples | {
        "jpeg grey": encoded(rgb.convert("L"), "JPEG"),
        "jpeg rotated": encoded(rgb, "JPEG", exif=rotated(6)),
        "jpeg profile": encoded(rgb, "JPEG", icc_profile=bytes(2_000)),
        # A search for the last marker, instead of reading segments, would end here.
        "jpeg comment": encoded(rgb, "JPEG", comment=b"\xff\xd9 not the end"),
        "jpeg two pictures": encoded(rgb, "MPO", **frames),
        "png grey": encoded(rgb.convert("L"), "PNG"),
        "png 1 bit": encoded(rgb.convert("1"), "PNG"),
        "png grey alpha": encoded(rgba.convert("LA"), "PNG"),
        "png 16 bits": deep_png(pixels(1, dtype=np.uint16)),
        "png 16 bits rgb": deep_png(pixels(3, dtype=np.uint16)),
        "png interlaced": png(WIDTH, HEIGHT, rows=adam7(random), interlace=1),
        "png animated": encoded(rgb, "PNG", **frames),
        "png rotated": encoded(rgb, "PNG", exif=rotated(3)),
        "webp animated": encoded(rgb, "WEBP", **frames),
        "webp rotated": encoded(rgb, "WEBP", exif=rotated(8)),
    }


def pixels_as_cmyk() -> Image.Image:
    return Image.fromarray(smooth(4), mode="CMYK")
