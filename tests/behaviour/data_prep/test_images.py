"""Checks of images, and pixels after each conversion, against arithmetic of the written rule."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

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
from vitscale.images.plain import SUFFIXES
from vitscale.runs.data_prep import ImageSettings

ROOT = Path(__file__).parents[3]
SAMPLES = small_samples()
ROWS = unfiltered(pixels(3))


def checked(data: bytes, *, convert: bool = True, **options: Any) -> CheckedImage:
    return check_image(
        data, settings=ImageSettings.model_validate(options), convert=convert
    )


PLAIN = [
    *(
        name
        for name in SAMPLES
        if name.startswith("jpeg") and name[5:] not in ("cmyk", "rotated")
    ),
    *(
        "png",
        "png smooth",
        "png grey",
        "png 1 bit",
        "png palette",
        "png palette 4 bits",
    ),
    *("png interlaced", "webp", "webp smooth", "webp lossless"),
]


@pytest.mark.parametrize("check", ["header", "decode"])
@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_stay_untouched_unless_something_forces_a_change(
    name: str, check: str
) -> None:
    data = SAMPLES[name]
    image = checked(data, check=check)
    assert image.reason is None
    assert image.input_hash == blake3(data).digest()
    assert image.content_hash == blake3(image.content).digest()
    if name in PLAIN:
        assert image.content is data
        assert image.content_hash is image.input_hash
        assert image.changes is None
        suffix = SUFFIXES[name.split()[0].upper()]
        assert (image.extension, image.width, image.height) == (suffix, WIDTH, HEIGHT)
    else:
        assert image.changes and set(image.changes.split(",")) <= set(CHANGES)
        assert checked(data, check=check, convert=False).content in (data, b"")


def faults() -> list[tuple[str, bytes, dict[str, Any]]]:
    jpeg, png_, webp = SAMPLES["jpeg"], SAMPLES["png"], SAMPLES["webp"]
    packed = gzip.compress(jpeg, mtime=0)
    half = len(ROWS) // 2
    text = b"k\0\0" + zlib.compress(bytes(50 << 20))
    return [
        ("empty", b"", {}),
        ("bad_gzip", packed[:-1], {}),
        ("bad_gzip", packed[:-8] + b"12345678", {}),
        ("bad_gzip", b"\x1f\x8b\x08\0", {}),
        ("bad_gzip", packed[:60] + b"\xff" * 60 + packed[120:], {}),
        ("not_an_image", b"<!DOCTYPE html><html>", {}),
        ("not_an_image", bytes(1000), {}),
        ("not_an_image", gzip.compress(b"some text", mtime=0), {}),
        ("not_an_image", gzip.compress(packed, mtime=0), {}),
        ("other_format", encoded(pixels(3), "TIFF"), {"convert": False}),
        ("other_format", encoded(pixels(3), "JPEG2000"), {}),
        ("other_format", gzip.compress(encoded(pixels(3), "ICO"), mtime=0), {}),
        ("bad_header", png(WIDTH, HEIGHT, rows=ROWS, before=chunk(b"zTXt", text)), {}),
        ("bad_pixels", b"\xff\xd8\xff\xd9", {}),
        ("too_many_pixels", png(60_000, 60_000, rows=bytes(1000) * 60), {}),
        ("too_many_pixels", jpeg, {"max_pixels": WIDTH * HEIGHT - 1}),
        ("too_small", jpeg, {"min_side": HEIGHT + 1}),
        ("deep_grey", SAMPLES["png 16 bits"], {"convert": False}),
        ("bad_pixels", jpeg[:-300], {}),
        ("bad_pixels", png_[:-300], {}),
        ("bad_pixels", webp[:-300], {}),
        ("bad_pixels", png(WIDTH, HEIGHT, rows=ROWS[:half]), {"check": "decode"}),
        ("bad_pixels", deep_png(pixels(3, dtype=np.uint16))[:-300], {}),
    ]


@pytest.mark.parametrize("reason, data, options", faults())
def test_unusable_content_is_rejected_with_its_reason(
    reason: str, data: bytes, options: dict[str, Any]
) -> None:
    image = checked(data, **{"check": "header", **options})
    assert (
        image.reason == checked(data, **{"check": "decode", **options}).reason == reason
    )
    assert image.content == b"" and image.changes is None
    assert image.input_hash == blake3(data).digest()


def test_limits_are_inclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        checked(SAMPLES["jpeg"], max_pixels=WIDTH * HEIGHT, min_side=HEIGHT).reason
        is None
    )
    size = len(SAMPLES["png"])
    for limit, reason in ((size, None), (size - 1, "too_large")):
        monkeypatch.setattr(checking, "MAX_FILE_BYTES", limit)
        for data in (SAMPLES["png"], gzip.compress(SAMPLES["png"], 9)):
            assert len(data) > limit or checked(data).reason == reason


@pytest.mark.parametrize("check", ["header", "decode"])
@pytest.mark.parametrize("convert", [False, True])
def test_gzip_is_taken_off(convert: bool, check: str) -> None:
    for name in ("jpeg", "png", "webp"):
        image = checked(gzip.compress(SAMPLES[name]), convert=convert, check=check)
        assert (image.reason, image.changes) == (None, "gzip")
        assert image.content == SAMPLES[name]
        assert image.content_hash == blake3(SAMPLES[name]).digest() != image.input_hash
    image = checked(gzip.compress(SAMPLES["jpeg cmyk"]))
    assert image.changes == "gzip,cmyk"
    assert image.content == checked(SAMPLES["jpeg cmyk"]).content


def test_lack_of_memory_rejects_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    for name in ("jpeg", "jpeg cmyk", "png"):
        with pytest.raises(MemoryError):
            checked(SAMPLES[name])


def test_bombs_are_disarmed_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would unpack to 256 MiB."""
    monkeypatch.setattr(checking, "MAX_FILE_BYTES", 1 << 20)

    def zeros(start: bytes, wbits: int) -> bytes:
        # A block after a full flush can be repeated.
        deflate = zlib.compressobj(9, wbits=wbits)
        first = deflate.compress(start) + deflate.flush(zlib.Z_FULL_FLUSH)
        return first + 256 * (
            deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
        )

    bombs = {
        "too_large": zeros(SAMPLES["jpeg"], 31),
        "not_an_image": zeros(b"", 31),
        "bad_header": png(8, 8, before=chunk(b"zTXt", b"k\0\0" + zeros(b"", 15))),
        None: png(WIDTH, HEIGHT, packed=zeros(ROWS, 15)),
    }
    tracemalloc.start()
    for reason, data in bombs.items():
        assert checked(data).reason == reason
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_every_fault_and_change_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "images.md").read_text("utf-8")
    for name in (*FAULTS, *CHANGES):
        assert f"`{name}`" in text, name


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_fault_check_equals_decoding_every_pixel(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["jpeg", "jpeg grey", "jpeg progressive"]))
    jpeg = bytearray(SAMPLES[name])
    start = jpeg.find(b"\xff\xda") + 14
    at = data.draw(st.integers(start, len(jpeg) - 2))
    damage = data.draw(st.binary(min_size=1, max_size=40) | st.just(b"\xff\xd9"))
    jpeg[at : at + data.draw(st.sampled_from([0, len(damage), 40]))] = damage
    if checked(bytes(jpeg), check="header").reason is not None:
        return
    try:
        Image.open(io.BytesIO(jpeg)).load()
        expected = None
    except Exception:
        expected = "bad_pixels"
    assert checked(bytes(jpeg), check="decode").reason == expected


def test_strict_check_passes_valid_images_and_rejects_noise() -> None:
    for name, data in SAMPLES.items():
        assert checked(data, check="strict").reason is None, name
        same = [checked(data, check=c, convert=False) for c in ("decode", "strict")]
        assert same[0] == same[1], name
    chance = np.random.default_rng(0)
    photo = encoded(
        chance.integers(0, 256, (200, 200, 3), np.uint8), "JPEG", quality=80
    )
    start = photo.find(b"\xff\xda") + 14
    found = {"decode": 0, "strict": 0}
    for _ in range(20):
        at = int(chance.integers(start, len(photo) - 600))
        # Without markers, which every decoder notices.
        noise = bytes(chance.integers(0, 255, 512, np.uint8))
        damaged = photo[:at] + noise + photo[at + 512 :]
        for check in found:
            found[check] += checked(damaged, check=check).reason == "bad_pixels"
    assert found["strict"] == 20 > found["decode"]


@pytest.mark.parametrize("check", ["header", "decode"])
@pytest.mark.parametrize("name", SAMPLES)
def test_truncation_is_found_at_every_offset(name: str, check: str) -> None:
    data = SAMPLES[name]
    for end in range(len(data)):
        if checked(data[:end], check=check).reason is None:
            # Only data after the picture may be missing: a phone's second picture.
            assert name == "jpeg two pictures", end
            assert np.array_equal(decoded(data[:end], "RGB"), decoded(data, "RGB"))


# JPEG at quality 95 keeps smooth images to a few levels.
JPEG_TOLERANCE = 6


def converted(data: bytes, **options: object) -> CheckedImage:
    verdict = check_image(data, settings=ImageSettings.model_validate(options))
    assert verdict.reason is None
    assert verdict.content is not data
    image = Image.open(io.BytesIO(verdict.content))
    assert image.mode in ("RGB", "L")
    assert image.size == (verdict.width, verdict.height)
    assert not image.getexif() and not image.has_transparency_data
    assert getattr(image, "n_frames", 1) == 1 and "icc_profile" not in image.info
    return verdict


def over_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    weighted = colour.astype(np.float64) * alpha + 255.0 * (255.0 - alpha)
    return np.floor(weighted / 255 + 0.5).astype(np.uint8)


def close(a: np.ndarray, b: np.ndarray, tolerance: int = JPEG_TOLERANCE) -> bool:
    return a.shape == b.shape and int(np.abs(a.astype(int) - b).max()) <= tolerance


def test_cmyk_jpeg_becomes_rgb_jpeg() -> None:
    image = pixels_as_cmyk()
    ink = np.asarray(image).astype(float)
    expected = np.floor((255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255 + 0.5).astype(
        np.uint8
    )
    verdict = converted(
        encoded(image, "JPEG", quality=100, subsampling=0, icc_profile=b"abc")
    )
    assert (verdict.changes, verdict.extension) == ("cmyk", "jpg")
    assert close(decoded(verdict.content), expected)
    # Chroma is kept in full.
    frame = verdict.content.index(b"\xff\xc0")
    assert verdict.content[frame + 11] == 0x11


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bit_png_is_rounded_to_8_bits(channels: int) -> None:
    samples = pixels(channels, dtype=np.uint16)
    verdict = converted(deep_png(samples))
    expected = np.floor(samples / 257.0 + 0.5).astype(np.uint8)
    if channels in (2, 4):
        expected = over_white(expected[..., :-1], expected[..., -1:])
        assert verdict.changes == "16_bit,transparency"
    else:
        assert verdict.changes == "16_bit"
    assert verdict.extension == "png"
    # Only grey is rounded: Pillow cuts the low byte off colours and of opacity.
    found = decoded(verdict.content, "L" if channels < 3 else "RGB")
    assert close(found, expected.squeeze(), tolerance=(0, 2, 1, 2)[channels - 1])


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_over_white(mode: str) -> None:
    rgba = Image.fromarray(pixels(4)).convert(mode)
    samples = np.asarray(rgba)
    verdict = converted(encoded(rgba, "PNG"))
    assert (verdict.changes, verdict.extension) == ("transparency", "png")
    expected = over_white(samples[..., :-1], samples[..., -1:]).squeeze()
    assert np.array_equal(decoded(verdict.content), expected)


def test_transparent_palette_entries_are_laid_over_white() -> None:
    image = Image.fromarray(pixels(3)).quantize(16)
    colours = np.asarray(image.convert("RGB"))
    indices = np.asarray(image)
    alphas = np.full(256, 255)
    alphas[:5] = [0, 40, 128, 255, 3]
    for data, alpha in [
        (
            encoded(image, "PNG", transparency=bytes([0, 40, 128, 255, 3])),
            alphas[indices],
        ),
        (encoded(image, "PNG", transparency=7), np.where(indices == 7, 0, 255)),
    ]:
        verdict = converted(data)
        assert (verdict.changes, verdict.extension) == ("transparency", "png")
        assert np.array_equal(
            decoded(verdict.content), over_white(colours, alpha[..., None])
        )


@pytest.mark.parametrize("format, extension", [("PNG", "png"), ("WEBP", "png")])
def test_the_first_frame_of_an_animation_stays(format: str, extension: str) -> None:
    first, second = Image.fromarray(pixels(3)), Image.fromarray(pixels(3, seed=1))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], **options)
    verdict = converted(data)
    assert (verdict.changes, verdict.extension) == ("animation", extension)
    assert np.array_equal(decoded(verdict.content), np.asarray(first))


def test_lossy_webp_becomes_jpeg() -> None:
    rgba = np.dstack([smooth(), np.full((HEIGHT, WIDTH), 128, np.uint8)])
    data = encoded(rgba, "WEBP", quality=100)
    samples = decoded(data)
    verdict = converted(data)
    assert (verdict.changes, verdict.extension) == ("transparency", "jpg")
    assert close(
        decoded(verdict.content), over_white(samples[..., :3], samples[..., 3:])
    )


@pytest.mark.parametrize(
    "format, extension", [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "jpg")]
)
def test_rotated_images_are_stored_upright(format: str, extension: str) -> None:
    data = encoded(smooth(), format, exif=rotated(6))
    verdict = converted(data)
    assert (verdict.changes, verdict.extension) == ("exif_rotation", extension)
    tolerance = 0 if format == "PNG" else JPEG_TOLERANCE
    assert close(decoded(verdict.content), np.rot90(decoded(data), -1), tolerance)


def test_every_rotation_is_found_and_undone() -> None:
    texts = {"XML:com.adobe.xmp": 'tiff:Orientation="6"'}
    texts["Raw profile type exif"] = "\n\n\n" + rotated(6).tobytes().hex()
    for text in texts.items():
        info = PngInfo()
        info.add_itxt(*text)
        assert (
            converted(encoded(smooth(), "PNG", pnginfo=info)).changes == "exif_rotation"
        )
    for turn in range(2, 9):
        data = encoded(smooth(), "PNG", exif=rotated(turn))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(decoded(converted(data).content), np.asarray(expected))


@pytest.mark.parametrize("size", [(64, 40), (41, 999)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_the_short_side_has_the_length_asked_for(
    format: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    image = np.stack(
        [x * 255 // size[0], y * 255 // size[1], x * 0 + 90], axis=2
    ).astype(np.uint8)
    verdict = converted(encoded(image, format), short_side=16)
    assert (verdict.changes, verdict.extension) == ("short_side", "jpg")
    long = max(size) * 16 / min(size)
    assert min(verdict.width, verdict.height) == 16
    assert abs(max(verdict.width, verdict.height) - long) <= 0.5
    # A plane of colour stays the same plane, sampled more coarsely.
    y, x = np.mgrid[0 : verdict.height, 0 : verdict.width]
    expected = np.stack(
        [(x + 0.5) * 255 / verdict.width, (y + 0.5) * 255 / verdict.height, x * 0 + 90],
        axis=2,
    )
    inner = (slice(2, -2), slice(2, -2))
    assert close(
        decoded(verdict.content)[inner], np.rint(expected).astype(int)[inner], 14
    )
    monkeypatch.setattr(checking, "JPEG_MAX_SIDE", 20)
    assert converted(encoded(image, format), short_side=16).extension == "png"


@pytest.mark.parametrize("name", small_samples())
def test_same_bytes_every_time_and_plain_after_one_pass(name: str) -> None:
    data = small_samples()[name]
    for options in ({}, {"short_side": 8}):
        settings = ImageSettings.model_validate(options)
        first = check_image(data, settings=settings)
        assert first == check_image(data, settings=settings)
        again = check_image(first.content, settings=settings)
        assert (again.content, again.changes) == (first.content, None)
