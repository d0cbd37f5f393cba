"""Images that were not prepared become upright, opaque RGB."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.corpora.photographs import jpeg, photograph
from vitscale.images.crops import converted_pixels

PHOTO = photograph(40, 30)


def png(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", **options)
    return file.getvalue()


def found(data: bytes) -> np.ndarray:
    pixels = converted_pixels(data)
    assert pixels is not None
    return pixels.numpy()


def test_upright_jpegs_are_left_to_the_decoders() -> None:
    assert converted_pixels(jpeg(PHOTO)) is None
    assert np.array_equal(found(png(PHOTO)), np.asarray(PHOTO))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_rotation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    data = jpeg(PHOTO, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(found(data), np.asarray(expected))
    assert (found(data).shape[0] > found(data).shape[1]) == (orientation >= 5)


def test_transparent_pixels_are_white() -> None:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.new("L", PHOTO.size, 0))
    assert (found(png(image)) == 255).all()
    palette = PHOTO.convert("P")
    assert (found(png(palette, transparency=palette.getpixel((0, 0)))) == 255).any()


def test_grey_of_16_bits_is_rounded() -> None:
    levels = np.linspace(0, 65535, 1200).reshape(30, 40).astype(np.uint16)
    pixels = found(png(Image.fromarray(levels)))
    assert np.array_equal(pixels[..., 0], np.rint(levels / 257).astype(np.uint8))


def test_broken_metadata_does_not_matter() -> None:
    assert converted_pixels(jpeg(PHOTO, exif=b"Exif\0\0" + b"II*\0\xff\xff\xff\xff")) is None


@pytest.mark.parametrize("data", [b"", b"no image", png(PHOTO)[:200]])
def test_unreadable_images_raise(data: bytes) -> None:
    with pytest.raises((OSError, ValueError)):
        converted_pixels(data)
