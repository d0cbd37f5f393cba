"""Where a picture ends, which colour of a PNG is transparent, and what Pillow says of both."""

import gzip
import io
import os
import struct

import numpy as np
from PIL import Image

from data_prep.images.check import check_image
from tests.support.corpora.image_samples import (
    adam7,
    chunk,
    decoded,
    encoded,
    pixels,
    pixels_as_cmyk,
    png,
    smooth,
    unfiltered,
)
from tests.support.tables import every, rows
from tests.support.waiting import run_python
from vitscale.images.plain import rgb_pixels
from vitscale.runs.data_prep import ImageSettings

RGB = Image.fromarray(pixels(3))
# Phones store a short film behind the still: bytes that no decoder of images knows.
MOVIE = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + np.random.default_rng(0).bytes(300_000)
OTHER = encoded(smooth(), "JPEG")


def segment(marker, content):
    # A marker, and a length that counts itself.
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def with_segment(jpeg, marker, content):
    return jpeg[:2] + segment(marker, content) + jpeg[2:]


def two_scans(jpeg, marker, content):
    """A progressive JPEG with a segment before its last scan."""
    # 0xFFDA begins a scan.
    at = jpeg.rindex(b"\xff\xda")
    return jpeg[:at] + segment(marker, content) + jpeg[at:]


PROGRESSIVE = encoded(RGB, "JPEG", progressive=True)
JPEGS = {
    "baseline": encoded(RGB, "JPEG"),
    "4:4:4": encoded(RGB, "JPEG", subsampling=0),
    "grey": encoded(RGB.convert("L"), "JPEG"),
    "CMYK": encoded(pixels_as_cmyk(), "JPEG"),
    "progressive": PROGRESSIVE,
    "restart markers": encoded(RGB, "JPEG", restart_marker_blocks=1),
    # Other pictures inside of this one: their ends are not its end.
    "thumbnail in EXIF": with_segment(encoded(RGB, "JPEG"), 0xE1, b"Exif\0\0" + OTHER),
    "thumbnail in a progressive one": with_segment(
        PROGRESSIVE,
        0xE1,
        b"Exif\0\0" + OTHER,
    ),
    "end marker in a comment": with_segment(
        encoded(RGB, "JPEG"),
        0xFE,
        b"\xff\xda\xff\xd9",
    ),
    "picture between two scans": two_scans(PROGRESSIVE, 0xFE, OTHER),
    "fill bytes": encoded(RGB, "JPEG").replace(b"\xff\xda", b"\xff\xff\xff\xda", 1),
    "MPO": encoded(
        RGB, "MPO", save_all=True, append_images=[Image.fromarray(smooth())]
    ),
}

# Markers of JPEG occur in them, complete and broken, as they do by chance in films.
TAILS = {
    "nothing": b"",
    "zeros": bytes(4096),
    "text": b"\r\n<html>SEFT</html>",
    "movie": MOVIE,
    "movie, then an end": MOVIE + b"\xff\xd9",
    "movie, then a start": MOVIE + b"\xff\xda\x12\x34",
    "whole picture": OTHER,
    "cut picture": OTHER[:-40],
    "header of a picture": OTHER[:200],
    "archive": gzip.compress(b"x" * 1000) + b"\xff\xd8\xff",
    "one byte": b"\xff",
}


@every(check="header, decode, strict", kind=JPEGS, tail=TAILS)
def test_anything_may_follow_a_picture(kind, tail, check):
    picture = JPEGS[kind]
    data = picture + TAILS[tail]
    checked = check_image(data, settings=ImageSettings(check=check))
    assert checked.reason is None

    # Pillow decodes the same pixels with and without the tail.
    assert np.array_equal(decoded(data, "RGB"), decoded(picture, "RGB"))

    # CMYK is converted, and its tail is left behind.
    if kind != "CMYK":
        assert checked.content == data
        assert checked.changes is None


@every(tail=[b"", MOVIE, OTHER, b"\xff\xd9"[:1], bytes(100)])
@every(kind=[kind for kind in JPEGS if kind != "MPO"])
def test_a_cut_picture_is_not_whole_whatever_follows(kind, tail):
    data = JPEGS[kind]
    settings = ImageSettings(check="header")

    # In the last scan, shortly before its end, and without the end marker.
    for end in (data.rindex(b"\xff\xda") + 20, len(data) - 30, len(data) - 2):
        checked = check_image(data[:end] + tail, settings=settings)

        # Noise behind a cut may go on as pixels do, up to an end marker of its own.
        assert checked.reason == "bad_pixels" or tail in (MOVIE, OTHER), end


def keyed_png(samples, key, *, interlaced):
    """A 16-bit PNG, grey or RGB, with a transparent colour."""
    height, width, channels = samples.shape
    # Adam7 stores the pixels in seven passes, for which readers have code of their own.
    rows = adam7(samples) if interlaced else unfiltered(samples)
    return png(
        width,
        height,
        depth=16,
        colour={1: 0, 3: 2}[channels],
        rows=rows,
        before=chunk(b"tRNS", struct.pack(f">{channels}H", *key)),
        interlace=int(interlaced),
    )


# High and low byte of the key: different, equal, and at both ends.
@every(channels="1, 3", interlaced="false, true")
@rows("""
- [high, low]
- [0x12, 0x34]
- [0x40, 0x40]
- [0x00, 0x00]
- [0xFF, 0xFF]
- [0x80, 0x00]
- [0x00, 0x80]
""")
def test_16_bit_colours_are_compared_in_16_bits(high, low, channels, interlaced):
    """The PNG specification, 11.3.2.1: all 16 bits count."""
    key = high << 8 | low
    near = [
        key,
        # Both bytes swapped, one bit of each changed, and one byte alone.
        low << 8 | high,
        key ^ 1,
        key ^ 0x0100,
        low,
        high,
    ]
    row = np.array([near, near[::-1]], np.uint16)
    samples = row[..., None].repeat(channels, axis=2)
    if channels == 3:
        samples[1, 0, 1] ^= 0x0100  # all but one sample of the colour
    data = keyed_png(samples, (key,) * channels, interlaced=interlaced)

    # Grey is rounded to 8 bits; of colours Pillow keeps the high byte.
    is_key = (samples == key).all(axis=2)
    levels = np.rint(samples / 257) if channels == 1 else samples >> 8
    expected = np.where(is_key[..., None], 255, levels).astype(np.uint8)
    checked = check_image(data, settings=ImageSettings())
    assert checked.changes == "16_bit,transparency"
    prepared = decoded(checked.content).reshape(expected.shape)
    assert np.array_equal(prepared, expected)

    # As `predict` reads it, without a preparation.
    with Image.open(io.BytesIO(data)) as image:
        rgb = np.broadcast_to(expected, (*is_key.shape, 3))
        assert np.array_equal(rgb_pixels(image), rgb)


@every(depth="1, 2, 4, 8")
def test_grey_of_few_bits_is_compared_as_stored(depth):
    """Prepared or not, in every value of the depth; bits above the depth do not count."""
    num_values = 1 << depth
    width = max(8, num_values)
    values = np.arange(width) % num_values
    key = num_values - 2
    bits = "".join(f"{value:0{depth}b}" for value in values)

    # Of 1 bit Pillow keeps only whether the key is 0.
    above = 0 if depth == 1 else 0x100
    trns = chunk(b"tRNS", struct.pack(">H", key | above))

    # One row: the number of its filter, then the bits of all values.
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8)
    data = png(width, 1, depth=depth, colour=0, rows=row, before=trns)
    levels = values * 255 // (num_values - 1)
    expected = np.where(values == key, 255, levels)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(rgb_pixels(image)[0, :, 1], expected)
    prepared = check_image(data, settings=ImageSettings()).content
    assert np.array_equal(decoded(prepared)[0], expected)


def test_pillow_warns_of_nothing_in_a_log():
    """Palettes with many opacities warn once a process, broken EXIF once an image."""
    palette = encoded(RGB.quantize(16), "PNG", transparency=bytes(range(16)))
    # One tag whose content would lie far behind the end of the block.
    broken = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\xff\xff\xff\x7f\x06\0\0\0"
    exif = with_segment(JPEGS["baseline"], 0xE1, broken)

    program = (
        "import sys, zlib; from vitscale.images.crops import decode, open_image\n"
        "from vitscale.images.plain import orientation\n"
        f"for data in ({palette!r}, {exif!r}):\n"
        "    decode(data)\n"
        "    with open_image(data) as image: orientation(image)\n"
    )
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_python("-W", "always", "-c", program, env=one_thread)
    assert done.returncode == 0

    # A line each would bury everything else in the log of a run.
    assert done.stderr == ""
