"""Checks of images, and pixels after each conversion, against arithmetic of the written rule."""

import gzip
import io
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from data_prep.images import check as checking
from data_prep.images.check import CHANGES, FAULTS, CheckedImage, check_image
from tests.support.corpora.image_samples import (
    HEIGHT,
    WIDTH,
    chunk,
    decoded,
    deep_png,
    encoded,
    pixels,
    pixels_as_cmyk,
    png,
    rotated,
    small_samples,
    smooth,
    unfiltered,
)
from tests.support.tables import every, rows, words
from vitscale.images.plain import SUFFIXES
from vitscale.runs.data_prep import ImageSettings

ROOT = Path(__file__).parents[3]
SAMPLES = small_samples()
ROWS = unfiltered(pixels(3))


def checked(data, *, convert=True, **options) -> CheckedImage:
    settings = ImageSettings.model_validate(options)
    return check_image(data, settings=settings, convert=convert)


# Samples that every decoder of training reads as they are.
PLAIN = {name for name in SAMPLES if name.startswith("jpeg")}
PLAIN -= {"jpeg cmyk", "jpeg rotated"}
PLAIN |= {
    "png",
    "png smooth",
    "png grey",
    "png 1 bit",
    "png palette",
    "png palette 4 bits",
    "png interlaced",
    "webp",
    "webp smooth",
    "webp lossless",
}


@words(check="header decode")
@every(name=SAMPLES)
def test_bytes_stay_untouched_unless_something_forces_a_change(name, check):
    data = SAMPLES[name]
    image = checked(data, check=check)
    assert image.reason is None
    assert image.input_hash == blake3(data).digest()
    assert image.content_hash == blake3(image.content).digest()
    if name not in PLAIN:
        # What is done is said, and without conversion nothing is done.
        assert image.changes
        assert set(image.changes.split(",")) <= set(CHANGES)
        unconverted = checked(data, check=check, convert=False)
        assert unconverted.content in (data, b"")
        return

    # The same object: neither a copy nor a second hash of a large file.
    assert image.content is data
    assert image.content_hash is image.input_hash
    assert image.changes is None
    format = name.split()[0].upper()
    assert image.extension == SUFFIXES[format]
    assert (image.width, image.height) == (WIDTH, HEIGHT)


def faults():
    jpeg = SAMPLES["jpeg"]
    png_ = SAMPLES["png"]
    webp = SAMPLES["webp"]
    packed = gzip.compress(jpeg, mtime=0)
    half = len(ROWS) // 2

    # 50 MiB of text in a few KiB, which Pillow refuses to unpack.
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(50 << 20)))
    return [
        ("empty", b"", {}),
        # Cut, with a wrong checksum, a header alone, and with other bytes in the middle.
        ("bad_gzip", packed[:-1], {}),
        ("bad_gzip", packed[:-8] + b"12345678", {}),
        ("bad_gzip", b"\x1f\x8b\x08\0", {}),
        ("bad_gzip", packed[:60] + b"\xff" * 60 + packed[120:], {}),
        # A page of the web instead of an image, zeros, and what gzip may also hold.
        ("not_an_image", b"<!DOCTYPE html><html>", {}),
        ("not_an_image", bytes(1000), {}),
        ("not_an_image", gzip.compress(b"some text", mtime=0), {}),
        ("not_an_image", gzip.compress(packed, mtime=0), {}),
        # Formats that Pillow could read.
        ("other_format", encoded(pixels(3), "TIFF"), {"convert": False}),
        ("other_format", encoded(pixels(3), "JPEG2000"), {}),
        ("other_format", gzip.compress(encoded(pixels(3), "ICO"), mtime=0), {}),
        ("bad_header", png(WIDTH, HEIGHT, rows=ROWS, before=text), {}),
        # Start and end alone; sizes that only the header has; and those that the settings exclude.
        ("bad_pixels", b"\xff\xd8\xff\xd9", {}),
        ("too_many_pixels", png(60_000, 60_000, rows=bytes(1000) * 60), {}),
        ("too_many_pixels", jpeg, {"max_pixels": WIDTH * HEIGHT - 1}),
        ("too_small", jpeg, {"min_side": HEIGHT + 1}),
        # Decoders of training would clip it to white.
        ("deep_grey", SAMPLES["png 16 bits"], {"convert": False}),
        # Each format without its end; the right end behind half of the pixels.
        ("bad_pixels", jpeg[:-300], {}),
        ("bad_pixels", png_[:-300], {}),
        ("bad_pixels", webp[:-300], {}),
        ("bad_pixels", png(WIDTH, HEIGHT, rows=ROWS[:half]), {"check": "decode"}),
        ("bad_pixels", deep_png(pixels(3, dtype=np.uint16))[:-300], {}),
    ]


@pytest.mark.parametrize("reason, data, options", faults())
def test_unusable_content_is_rejected_with_its_reason(reason, data, options):
    # Both checks find it, also the one that decodes nothing.
    image = checked(data, **{"check": "header", **options})
    assert image.reason == reason
    assert checked(data, **{"check": "decode", **options}).reason == reason

    # The ledger still identifies the input.
    assert image.content == b""
    assert image.changes is None
    assert image.input_hash == blake3(data).digest()


def test_limits_are_inclusive(monkeypatch):
    image = checked(SAMPLES["jpeg"], max_pixels=WIDTH * HEIGHT, min_side=HEIGHT)
    assert image.reason is None

    # As stored, and as unpacked: the packed file alone may be below the limit.
    png_ = SAMPLES["png"]
    packed = gzip.compress(png_, 9)
    size = len(png_)
    for limit, reason in ((size, None), (size - 1, "too_large")):
        monkeypatch.setattr(checking, "MAX_FILE_BYTES", limit)
        for data in (png_, packed):
            assert len(data) > limit or checked(data).reason == reason


@words(check="header decode")
@every(convert="false, true")
def test_gzip_is_taken_off(convert, check):
    for name in ("jpeg", "png", "webp"):
        data = SAMPLES[name]
        image = checked(gzip.compress(data), convert=convert, check=check)
        assert image.reason is None
        assert image.changes == "gzip"
        assert image.content == data

        # Equal images have equal hashes, packed or not.
        assert image.content_hash == blake3(data).digest() != image.input_hash

    # Other changes are found behind the packing.
    data = SAMPLES["jpeg cmyk"]
    image = checked(gzip.compress(data))
    assert image.changes == "gzip,cmyk"
    assert image.content == checked(data).content


def test_lack_of_memory_rejects_no_image(monkeypatch):
    def exhausted(*args, **options):
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    # Opened, converted, and decoded to the end: no place may take it for damage.
    for name in ("jpeg", "jpeg cmyk", "png"):
        with pytest.raises(MemoryError):
            checked(SAMPLES[name])


def test_bombs_are_disarmed_in_bounded_memory(monkeypatch):
    """Each would unpack to 256 MiB."""
    monkeypatch.setattr(checking, "MAX_FILE_BYTES", 1 << 20)

    def zeros(start, wbits):
        # A block after a full flush can be repeated.
        deflate = zlib.compressobj(9, wbits=wbits)
        first = deflate.compress(start) + deflate.flush(zlib.Z_FULL_FLUSH)
        block = deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
        return first + 256 * block

    # 31: gzip; 15: zlib, which PNG uses for texts and for pixels.
    text = b"k\0\0" + zeros(b"", 15)

    bombs = {
        "too_large": zeros(SAMPLES["jpeg"], 31),
        "not_an_image": zeros(b"", 31),
        "bad_header": png(8, 8, before=chunk(b"zTXt", text)),
        None: png(WIDTH, HEIGHT, packed=zeros(ROWS, 15)),
    }
    tracemalloc.start()
    for reason, data in bombs.items():
        assert checked(data).reason == reason

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_every_fault_and_change_is_in_the_docs():
    text = (ROOT / "docs" / "images.md").read_text("utf-8")
    for name in (*FAULTS, *CHANGES):
        assert f"`{name}`" in text, name


# Damage of the coded pixels of a JPEG: cut out, or overwritten, also by an early end.
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_fault_check_equals_decoding_every_pixel(data):
    name = data.draw(st.sampled_from(["jpeg", "jpeg grey", "jpeg progressive"]))
    jpeg = bytearray(SAMPLES[name])

    # Behind the header of the first scan, before the end marker.
    start = jpeg.find(b"\xff\xda") + 14
    at = data.draw(st.integers(start, len(jpeg) - 2))
    damage = data.draw(st.binary(min_size=1, max_size=40) | st.just(b"\xff\xd9"))
    num_replaced = data.draw(st.sampled_from([0, len(damage), 40]))
    jpeg[at : at + num_replaced] = damage
    damaged = bytes(jpeg)
    if checked(damaged, check="header").reason is not None:
        return

    # Pillow at the full size and in colour; the check decodes an eighth of it, in grey.
    expected = None
    try:
        Image.open(io.BytesIO(damaged)).load()
    except Exception:
        expected = "bad_pixels"
    assert checked(damaged, check="decode").reason == expected


def test_strict_check_passes_valid_images_and_rejects_noise():
    for name, data in SAMPLES.items():
        assert checked(data, check="strict").reason is None, name
        decode, strict = (
            checked(data, check=check, convert=False) for check in ("decode", "strict")
        )
        assert decode == strict, name

    chance = np.random.default_rng(0)
    noise = chance.integers(0, 256, (200, 200, 3), np.uint8)
    photo = encoded(noise, "JPEG", quality=80)
    start = photo.find(b"\xff\xda") + 14
    num_found = {"decode": 0, "strict": 0}
    for _ in range(20):
        at = int(chance.integers(start, len(photo) - 600))
        # Without markers, which every decoder notices.
        noise = bytes(chance.integers(0, 255, 512, np.uint8))
        damaged = photo[:at] + noise + photo[at + 512 :]
        for check in num_found:
            reason = checked(damaged, check=check).reason
            num_found[check] += reason == "bad_pixels"

    # libjpeg repairs most of it without a word; only the strict check counts that as damage.
    assert num_found["strict"] == 20 > num_found["decode"]


@words(check="header decode")
@every(name=SAMPLES)
def test_truncation_is_found_at_every_offset(name, check):
    data = SAMPLES[name]
    for end in range(len(data)):
        cut = data[:end]
        if checked(cut, check=check).reason is None:
            # Only data after the picture may be missing: a phone's second picture.
            assert name == "jpeg two pictures", end
            assert np.array_equal(decoded(cut, "RGB"), decoded(data, "RGB"))


# JPEG at quality 95 keeps smooth images to a few levels.
JPEG_TOLERANCE = 6


def converted(data, **options) -> CheckedImage:
    """Convert an image; what is stored must be a plain picture and nothing else."""
    verdict = check_image(data, settings=ImageSettings.model_validate(options))
    assert verdict.reason is None
    assert verdict.content is not data
    image = Image.open(io.BytesIO(verdict.content))
    assert image.mode in ("RGB", "L")
    assert image.size == (verdict.width, verdict.height)

    # A decoder that obeys one of these would show other pixels than one that does not.
    assert not image.getexif()
    assert not image.has_transparency_data
    assert getattr(image, "n_frames", 1) == 1
    assert "icc_profile" not in image.info
    return verdict


def over_white(colour, alpha):
    # In floats: 8-bit products would overflow. Half a level is rounded up.
    weighted = colour.astype(np.float64) * alpha + 255.0 * (255.0 - alpha)
    return np.floor(weighted / 255 + 0.5).astype(np.uint8)


def close(a, b, tolerance=JPEG_TOLERANCE):
    if a.shape != b.shape:
        return False
    differences = np.abs(a.astype(int) - b)
    return int(differences.max()) <= tolerance


def test_cmyk_jpeg_becomes_rgb_jpeg():
    image = pixels_as_cmyk()
    ink = np.asarray(image).astype(float)

    # Black covers what the three inks leave.
    light = (255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255
    expected = np.floor(light + 0.5).astype(np.uint8)
    data = encoded(
        image,
        "JPEG",
        quality=100,
        subsampling=0,
        icc_profile=b"abc",
    )
    verdict = converted(data)
    assert verdict.changes == "cmyk"
    assert verdict.extension == "jpg"
    assert close(decoded(verdict.content), expected)

    # Chroma is kept in full.
    frame = verdict.content.index(b"\xff\xc0")
    assert verdict.content[frame + 11] == 0x11


@every(channels="1, 2, 3, 4")
def test_16_bit_png_is_rounded_to_8_bits(channels):
    samples = pixels(channels, dtype=np.uint16)
    verdict = converted(deep_png(samples))

    # 65,535 is 257 times 255.
    expected = np.floor(samples / 257.0 + 0.5).astype(np.uint8)
    changes = "16_bit"
    if channels in (2, 4):
        expected = over_white(expected[..., :-1], expected[..., -1:])
        changes += ",transparency"
    assert verdict.changes == changes
    assert verdict.extension == "png"

    # Only grey is rounded: Pillow cuts the low byte off colours and of opacity.
    tolerance = (0, 2, 1, 2)[channels - 1]
    mode = "L" if channels < 3 else "RGB"
    assert close(decoded(verdict.content, mode), expected.squeeze(), tolerance)


@words(mode="RGBA LA")
def test_transparency_is_laid_over_white(mode):
    rgba = Image.fromarray(pixels(4)).convert(mode)
    samples = np.asarray(rgba)
    verdict = converted(encoded(rgba, "PNG"))
    assert verdict.changes == "transparency"
    assert verdict.extension == "png"
    expected = over_white(samples[..., :-1], samples[..., -1:])
    assert np.array_equal(decoded(verdict.content), expected.squeeze())


def test_transparent_palette_entries_are_laid_over_white():
    image = Image.fromarray(pixels(3)).quantize(16)
    colours = np.asarray(image.convert("RGB"))
    indices = np.asarray(image)

    # An opacity for each of the first entries, or one entry that is not there at all.
    opacities = [0, 40, 128, 255, 3]
    alphas = np.full(256, 255)
    alphas[: len(opacities)] = opacities
    for transparency, alpha in (
        (bytes(opacities), alphas[indices]),
        (7, np.where(indices == 7, 0, 255)),
    ):
        verdict = converted(encoded(image, "PNG", transparency=transparency))
        assert verdict.changes == "transparency"
        assert verdict.extension == "png"
        expected = over_white(colours, alpha[..., None])
        assert np.array_equal(decoded(verdict.content), expected)


@rows("[[format, extension], [PNG, png], [WEBP, png]]")
def test_the_first_frame_of_an_animation_stays(format, extension):
    first = Image.fromarray(pixels(3))
    second = Image.fromarray(pixels(3, seed=1))
    options = {"save_all": True, "append_images": [second]}
    if format == "WEBP":
        # Else the pixels would be close, not equal.
        options["lossless"] = True
    verdict = converted(encoded(first, format, **options))
    assert verdict.changes == "animation"
    assert verdict.extension == extension
    assert np.array_equal(decoded(verdict.content), np.asarray(first))


def test_lossy_webp_becomes_jpeg():
    half_opaque = np.full((HEIGHT, WIDTH), 128, np.uint8)
    rgba = np.dstack([smooth(), half_opaque])
    data = encoded(rgba, "WEBP", quality=100)

    # What the lossy file has, not what was put into it.
    samples = decoded(data)
    verdict = converted(data)
    assert verdict.changes == "transparency"
    assert verdict.extension == "jpg"
    expected = over_white(samples[..., :3], samples[..., 3:])
    assert close(decoded(verdict.content), expected)


@rows("[[format, extension], [JPEG, jpg], [PNG, png], [WEBP, jpg]]")
def test_rotated_images_are_stored_upright(format, extension):
    data = encoded(smooth(), format, exif=rotated(6))
    verdict = converted(data)
    assert verdict.changes == "exif_rotation"
    assert verdict.extension == extension

    # Value 6: the camera was turned, so the stored rows run from right to left.
    upright = np.rot90(decoded(data), -1)
    tolerance = 0 if format == "PNG" else JPEG_TOLERANCE
    assert close(decoded(verdict.content), upright, tolerance)


def test_every_rotation_is_found_and_undone():
    # Where programs have put it into a PNG before EXIF had a chunk of its own.
    texts = {
        "XML:com.adobe.xmp": 'tiff:Orientation="6"',
        "Raw profile type exif": "\n\n\n" + rotated(6).tobytes().hex(),
    }
    for key, text in texts.items():
        info = PngInfo()
        info.add_itxt(key, text)
        verdict = converted(encoded(smooth(), "PNG", pnginfo=info))
        assert verdict.changes == "exif_rotation"

    for turn in range(2, 9):
        data = encoded(smooth(), "PNG", exif=rotated(turn))
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(decoded(converted(data).content), np.asarray(upright))


@every(size="[64, 40], [41, 999]")
@words(format="JPEG PNG WEBP")
def test_the_short_side_has_the_length_asked_for(format, size, monkeypatch):
    width, height = size
    y, x = np.mgrid[:height, :width]
    plane = np.stack([x * 255 // width, y * 255 // height, x * 0 + 90], axis=2)
    data = encoded(plane.astype(np.uint8), format)
    verdict = converted(data, short_side=16)
    assert verdict.changes == "short_side"
    assert verdict.extension == "jpg"
    sides = (verdict.width, verdict.height)
    long = max(size) * 16 / min(size)
    assert min(sides) == 16
    assert abs(max(sides) - long) <= 0.5

    # A plane of colour stays the same plane, sampled more coarsely.
    width, height = sides
    y, x = np.mgrid[:height, :width] + 0.5
    plane = np.stack([x * 255 / width, y * 255 / height, x * 0 + 90], axis=2)
    expected = np.rint(plane).astype(int)

    # Without the border, where resampling has fewer neighbours.
    inner = (slice(2, -2), slice(2, -2))
    assert close(decoded(verdict.content)[inner], expected[inner], 14)

    # A JPEG cannot have a longer side than its library allows.
    monkeypatch.setattr(checking, "JPEG_MAX_SIDE", 20)
    assert converted(data, short_side=16).extension == "png"


@every(name=SAMPLES)
def test_same_bytes_every_time_and_plain_after_one_pass(name):
    data = SAMPLES[name]
    for options in ({}, {"short_side": 8}):
        settings = ImageSettings.model_validate(options)
        first = check_image(data, settings=settings)
        assert first == check_image(data, settings=settings)

        # What was stored once is an ordinary input the next time.
        again = check_image(first.content, settings=settings)
        assert (again.content, again.changes) == (first.content, None)
