"""TIFF, BMP, GIF, AVIF and HEIC: pixels after preparation and in `predict`, against what other
libraries have written, or the rule; bombs and damage.
"""

import io
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import tifffile
from PIL import Image

from data_prep.images.check import check_image
from finetune.images import converted_pixels
from tests.support.corpora.image_samples import (
    decoded,
    encoded,
    pixels,
    pixels_as_cmyk,
    rotated,
    smooth,
)
from tests.support.tables import every
from vitscale.images import plain
from vitscale.runs.data_prep import ImageSettings

SETTINGS = ImageSettings()


def tiff(samples, **options):
    """Encode by tifffile, which shares no code with Pillow."""
    file = io.BytesIO()
    tifffile.imwrite(file, samples, **options)
    return file.getvalue()


def bare_tiff(data, *tags):
    """A TIFF of 16 x 16 px of 8-bit grey. tags: others or more: number, kind, count, value."""
    # Width, height, bits, no compression, 0 is white or black, and where the one strip lies.
    usual = "256 16, 257 16, 258 8, 259 1, 262 1, 273 512, 277 1, 278 16, 279 256"
    values = {}
    for pair in usual.split(","):
        number, value = map(int, pair.split())
        values[number] = (3, 1, value)
    values |= {number: rest for number, *rest in tags}
    rows = [struct.pack("<HHLL", number, *values[number]) for number in sorted(values)]

    # Little-endian, the first directory at byte 8, its tags in order, and the pixels at 512.
    start = b"II*\0" + struct.pack("<LH", 8, len(rows)) + b"".join(rows)
    return start.ljust(512, b"\0") + data


def heic(turn):
    pillow_heif = pytest.importorskip("pillow_heif")
    image = Image.fromarray(SOFT)
    # The encoder turns this into a box of the file, as telephones write it.
    image.info["exif"] = rotated(turn).tobytes()
    pillow_heif.register_heif_opener()
    return encoded(image, "HEIF", quality=95)


def upright(image, turn):
    """By the meaning of the tag: where the first row and column of the samples are."""
    if turn > 4:
        image = image.swapaxes(0, 1)
    if turn in (2, 3, 6, 7):
        image = image[:, ::-1]
    if turn in (3, 4, 7, 8):
        image = image[::-1]
    return image


# Smooth for lossy formats, noise for exact ones.
SOFT = smooth()
RGB = pixels(3)
GREY = pixels(1, dtype=np.uint16).squeeze()
# 65,535 is 257 times 255; halves go up.
LEVELS = np.floor(GREY / 257 + 0.5)
PALETTE = Image.fromarray(RGB).quantize(16)
COLOURS = np.asarray(PALETTE.convert("RGB"))
BUT_THE_THIRD = np.where(np.asarray(PALETTE)[..., None] == 3, 255, COLOURS)
# A second frame, which must leave no trace.
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", PALETTE.size)]}
# As in test_images: black covers what the inks leave, and what is not opaque is white.
INK = np.asarray(pixels_as_cmyk()).astype(float)
UNDER_INK = np.floor((255 - INK[..., :3]) * (255 - INK[..., 3:]) / 255 + 0.5)
RGBA = pixels(4)
OPACITY = RGBA[..., 3:] / 255
OVER_WHITE = np.floor(RGBA[..., :3] * OPACITY + 255 * (1 - OPACITY) + 0.5)
# Twelve bits: two samples in three bytes.
TWELVE = np.arange(256) * 16 + np.arange(256) % 16
PAIRS = TWELVE.reshape(-1, 2) @ [1 << 12, 1]
PACKED = b"".join(int(pair).to_bytes(3, "big") for pair in PAIRS)

# A file, its pixels, and the changes besides `converted`.
IMAGES = """
tiff(RGB, photometric="rgb") | RGB |
tiff(np.moveaxis(RGB, 2, 0).copy(), photometric="rgb", planarconfig="separate") | RGB |
tiff(RGB, photometric="rgb", tile=(16, 16), compression="zlib") | RGB |
encoded(RGB, "TIFF", compression="tiff_lzw") | RGB |
tiff(GREY, byteorder=">") | LEVELS | 16_bit
tiff(GREY, compression="zlib") | LEVELS | 16_bit
tiff(GREY, photometric="miniswhite") | 255 - LEVELS | 16_bit
tiff(GREY) | LEVELS | 16_bit
tiff(RGB[..., 0], photometric="miniswhite") | 255 - RGB[..., 0] |
tiff(pixels(3, dtype=np.uint16), photometric="rgb") | pixels(3, dtype=np.uint16) >> 8 | 16_bit
bare_tiff(PACKED, (258, 3, 1, 12), (279, 3, 1, 384)) | TWELVE.reshape(16, 16) * 255 / 4095 | 16_bit
encoded(pixels_as_cmyk(), "TIFF") | UNDER_INK | cmyk
tiff(RGBA, photometric="rgb", extrasamples=["unassalpha"]) | OVER_WHITE | transparency
encoded(PALETTE, "TIFF") | COLOURS |
tiff(np.stack([GREY] + 4 * [65535 - GREY]), photometric="minisblack") | LEVELS | 16_bit,animation
encoded(RGB, "TIFF", exif=rotated(3)) | upright(RGB, 3) | exif_rotation
encoded(RGB, "TIFF", exif=rotated(5)) | upright(RGB, 5) | exif_rotation
encoded(RGB, "TIFF", exif=rotated(6)) | upright(RGB, 6) | exif_rotation
encoded(RGB, "BMP") | RGB |
encoded(PALETTE, "GIF") | COLOURS |
encoded(PALETTE, "BMP") | COLOURS |
encoded(PALETTE, "GIF", transparency=3) | BUT_THE_THIRD | transparency
encoded(PALETTE, "GIF", **FRAMES) | COLOURS | animation
encoded(SOFT, "AVIF", quality=95) | SOFT |
encoded(SOFT, "AVIF", quality=95, exif=rotated(6)) | upright(SOFT, 6) | exif_rotation
heic(1) | SOFT |
heic(6) | upright(SOFT, 6) |
heic(8) | upright(SOFT, 8) |
""".strip().splitlines()

# More numbers than memory, in a tag and in EXIF; a tile of a gigabyte; samples without a white.
ZEROS = bytes(1 << 24)
TAG_OF_EXIF = struct.pack("<HHHLLL", 1, 40000, 3, 1 << 23, 530, 0)
REFUSED = """
bare_tiff(ZEROS, (273, 3, 1 << 23, 512))
bare_tiff(TAG_OF_EXIF + ZEROS, (34665, 4, 1, 512))
bare_tiff(ZEROS, (322, 4, 1, 1 << 15), (323, 4, 1, 1 << 15), (324, 4, 1, 512), (325, 4, 1, 256))
tiff(GREY.astype(np.float32))
tiff(GREY.astype(np.int16))
tiff(np.stack(3 * [GREY]), photometric="rgb", planarconfig="separate")
tiff(RGB)[:20]
""".strip().splitlines()


@every(line=IMAGES)
def test_pixels_are_those_written(line):
    file, written, changes = (cell.strip() for cell in line.split(" |"))
    data = eval(file)
    expected = eval(written)
    if expected.ndim == 2:
        expected = np.dstack(3 * [expected])
    kept = check_image(data, settings=SETTINGS)
    assert kept.changes == f"converted,{changes}".strip(",")
    assert (kept.height, kept.width) == expected.shape[:2]

    # A lossy file stays lossy, with the loss of two encodings; the others are exact.
    is_lossy = "SOFT" in written
    tolerance = 8 if is_lossy else 0.5
    assert kept.extension == ("jpg" if is_lossy else "png")

    # `predict` reads the file itself, training what was stored.
    prepared = decoded(kept.content, "RGB")
    predicted = converted_pixels(data).numpy()
    for found in (prepared, predicted):
        assert found.shape == expected.shape
        assert np.abs(found - expected.astype(float)).max() <= tolerance

    # Decoders of shards do not read it.
    unconverted = check_image(data, settings=SETTINGS, convert=False)
    assert unconverted.reason == "other_format"
    smaller = check_image(data, settings=ImageSettings(short_side=8))
    assert min(smaller.width, smaller.height) == 8
    assert smaller.extension == "jpg"


@every(line=IMAGES[3::4])
def test_a_cut_file_is_rejected_unless_its_picture_is_whole(line):
    file, _, _ = line.partition(" |")
    data = eval(file)
    whole = check_image(data, settings=SETTINGS).content

    # Every seventh byte, and each of the last, where only padding may be missing.
    for end in {*range(0, len(data), 7), *range(len(data) - 20, len(data))}:
        kept = check_image(data[:end], settings=SETTINGS).content
        assert kept in (whole, b""), end


def test_damage_is_a_reason_and_no_traceback():
    # A traceback ends the test; which reason it is depends on the bytes.
    limits = ImageSettings(max_pixels=10**6)
    chance = np.random.default_rng(0)
    for line in IMAGES:
        file, _, _ = line.partition(" |")
        data = np.frombuffer(eval(file), np.uint8)
        for _ in range(10):
            damaged = data.copy()
            places = chance.integers(0, len(data), 3)
            damaged[places] = chance.integers(0, 256, 3)
            check_image(damaged.tobytes(), settings=limits)


@every(file=REFUSED)
def test_bombs_and_unknown_samples_cost_no_memory(file):
    data = eval(file)
    tracemalloc.start()
    assert check_image(data, settings=SETTINGS).reason == "bad_header"
    with pytest.raises((OSError, ValueError)):
        converted_pixels(data)
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 32 << 20
    tracemalloc.stop()


def test_a_missing_decoder_says_what_to_install(monkeypatch):
    data = heic(1)
    # None in sys.modules makes the import fail, as if the package were not there.
    monkeypatch.setitem(sys.modules, "pillow_heif", None)

    # The first use is remembered, and by now there was one.
    plain._add_heif.cache_clear()
    assert check_image(data, settings=SETTINGS).reason == "no_decoder"
    with pytest.raises(ValueError, match="pip install pillow-heif"):
        converted_pixels(data)
    plain._add_heif.cache_clear()
