"""Pixels after each conversion, against arithmetic of the written rule."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from data_prep.images.check import CheckedImage, check_image
from tests.support.corpora.image_samples import (
    HEIGHT,
    WIDTH,
    adam7,
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
)
from vitscale.runs.data_prep import ImageSettings

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


def to_8_bits(samples: np.ndarray) -> np.ndarray:
    return np.floor(samples / 257.0 + 0.5).astype(np.uint8)


def close(a: np.ndarray, b: np.ndarray, tolerance: int = JPEG_TOLERANCE) -> bool:
    return a.shape == b.shape and int(np.abs(a.astype(int) - b).max()) <= tolerance


def test_cmyk_jpeg_becomes_rgb_jpeg() -> None:
    image = pixels_as_cmyk()
    ink = np.asarray(image).astype(float)
    expected = np.floor((255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255 + 0.5).astype(np.uint8)
    verdict = converted(encoded(image, "JPEG", quality=100, subsampling=0, icc_profile=b"abc"))
    assert (verdict.changes, verdict.extension) == ("cmyk", "jpg")
    assert close(decoded(verdict.content), expected)
    # Chroma is kept in full.
    frame = verdict.content.index(b"\xff\xc0")
    assert verdict.content[frame + 11] == 0x11


@pytest.mark.parametrize("channels, interlace", [(1, 0), (2, 1), (3, 0), (4, 0)])
def test_16_bit_png_is_rounded_to_8_bits(channels: int, interlace: int) -> None:
    samples = pixels(channels, dtype=np.uint16)
    data = deep_png(samples)
    if interlace:
        colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
        data = png(WIDTH, HEIGHT, depth=16, colour=colour, rows=adam7(samples), interlace=1)
    verdict = converted(data)
    expected = to_8_bits(samples)
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
        (encoded(image, "PNG", transparency=bytes([0, 40, 128, 255, 3])), alphas[indices]),
        (encoded(image, "PNG", transparency=7), np.where(indices == 7, 0, 255)),
    ]:
        verdict = converted(data)
        assert (verdict.changes, verdict.extension) == ("transparency", "png")
        assert np.array_equal(decoded(verdict.content), over_white(colours, alpha[..., None]))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_transparent_grey_of_every_depth_is_white(depth: int) -> None:
    values = np.arange(1 << depth, dtype=np.uint8)
    width, key = len(values), (1 << depth) - 2
    bits = "".join(f"{value:0{depth}b}" for value in values).ljust(8, "0")
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8)
    trns = chunk(b"tRNS", struct.pack(">H", key))
    data = png(width, 1, depth=depth, colour=0, rows=row, before=trns)
    expected = values * (255 // ((1 << depth) - 1))
    expected[key] = 255
    assert np.array_equal(decoded(converted(data).content)[0], expected)


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
    assert close(decoded(verdict.content), over_white(samples[..., :3], samples[..., 3:]))


UPRIGHT = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("format, extension", [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "jpg")])
def test_rotated_images_are_stored_upright(format: str, extension: str, orientation: int) -> None:
    data = encoded(smooth(), format, exif=rotated(orientation))
    stored = decoded(data)
    verdict = converted(data)
    assert (verdict.changes, verdict.extension) == ("exif_rotation", extension)
    tolerance = 0 if format == "PNG" else JPEG_TOLERANCE
    assert close(decoded(verdict.content), UPRIGHT[orientation](stored), tolerance)


@pytest.mark.parametrize("size", [(64, 40), (41, 999)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_the_short_side_has_the_length_asked_for(format: str, size: tuple[int, int]) -> None:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    image = np.stack([x * 255 // size[0], y * 255 // size[1], x * 0 + 90], axis=2).astype(np.uint8)
    verdict = converted(encoded(image, format), short_side=16)
    assert (verdict.changes, verdict.extension) == ("short_side", "jpg")
    long = max(size) * 16 / min(size)
    assert min(verdict.width, verdict.height) == 16
    assert abs(max(verdict.width, verdict.height) - long) <= 0.5
    # A plane of colour stays the same plane, sampled more coarsely.
    y, x = np.mgrid[0 : verdict.height, 0 : verdict.width]
    expected = np.stack(
        [(x + 0.5) * 255 / verdict.width, (y + 0.5) * 255 / verdict.height, x * 0 + 90], axis=2
    )
    inner = (slice(2, -2), slice(2, -2))
    assert close(decoded(verdict.content)[inner], np.rint(expected).astype(int)[inner], 14)


@pytest.mark.parametrize("name", small_samples())
def test_same_bytes_every_time_and_plain_after_one_pass(name: str) -> None:
    data = small_samples()[name]
    for options in ({}, {"short_side": 8}):
        settings = ImageSettings.model_validate(options)
        first = check_image(data, settings=settings)
        assert first == check_image(data, settings=settings)
        again = check_image(first.content, settings=settings)
        assert (again.content, again.changes) == (first.content, None)
