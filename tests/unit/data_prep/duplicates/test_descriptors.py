"""Copies of a picture match, different pictures do not."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from data_prep.duplicates.descriptors import (
    DESCRIPTOR,
    are_duplicates,
    equal_keys,
    has_contrast,
    image_descriptors,
)

NUM_IMAGES = 240
ORIENTATION_TAG = 0x0112
RESIZED = Image.Resampling.BICUBIC


def drawn(seed: int) -> Image.Image:
    """Shapes, a gradient in waves, or noise."""
    chance = np.random.default_rng(seed)
    width, height = (int(side) for side in chance.integers(64, 140, 2))
    colours = chance.integers(0, 256, (8, 3))
    if seed % 3 == 0:
        image = Image.new("RGB", (width, height), tuple(colours[0].tolist()))
        for colour in colours[1:]:
            x, y, w, h = (chance.random(4) * (width, height, width, height)).tolist()
            ImageDraw.Draw(image).ellipse((x, y, x + w / 2, y + h / 2), tuple(colour.tolist()))
        return image
    if seed % 3 == 1:
        y, x = np.mgrid[:height, :width]
        pitches, phases = chance.uniform(-12, 12, (3, 2)), chance.uniform(0, 6, 3)
        waves = [
            np.sin(x / width * a + y / height * b + c)
            for (a, b), c in zip(pitches, phases, strict=True)
        ]
        wave = (sum(waves) + 3) / 6
        return Image.fromarray((wave[..., None] * (40, 120, 255)).astype(np.uint8))
    noise = chance.integers(0, 256, (int(chance.integers(4, 12)), 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), RESIZED)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"compress_level": 1} if kind == "PNG" else options))
    return file.getvalue()


@cache
def images() -> list[Image.Image]:
    return [drawn(seed) for seed in range(NUM_IMAGES)]


@cache
def originals() -> np.ndarray:
    return image_descriptors([encoded(image) for image in images()])


def scaled(image: Image.Image, width: float, height: float) -> Image.Image:
    return image.resize((round(image.width * width), round(image.height * height)), RESIZED)


COPIES = {
    "jpeg": lambda image: encoded(image, "JPEG", quality=30),
    "webp": lambda image: encoded(image, "WEBP", quality=50),
    "smaller": lambda image: encoded(scaled(image, 0.42, 0.4)),
    "larger": lambda image: encoded(scaled(image, 2, 1.9), "JPEG", quality=90),
    "mirrored": lambda image: encoded(ImageOps.mirror(image)),
    "all": lambda image: encoded(ImageOps.mirror(scaled(image, 0.7, 0.72)), "JPEG", quality=50),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_found(kind: str) -> None:
    copies = image_descriptors([COPIES[kind](image) for image in images()])
    caught = are_duplicates(originals(), copies)
    assert caught.mean() >= 0.99
    assert np.array_equal(are_duplicates(copies, originals()), caught)


def test_different_pictures_do_not_match() -> None:
    first, second = np.triu_indices(NUM_IMAGES, 1)
    assert not are_duplicates(originals()[first], originals()[second]).any()


def test_blank_pictures_match_nothing() -> None:
    """Not even themselves, nor other blank pictures with encoding noise."""
    blank = [Image.new("RGB", (60, 50), (value,) * 3) for value in (0, 128, 130, 255)]
    noise = np.random.default_rng(0).integers(-3, 4, (50, 60, 3)) + 128
    contents = [encoded(image, "JPEG", quality=50) for image in blank]
    contents.append(encoded(Image.fromarray(noise.astype(np.uint8)), "JPEG", quality=30))
    found = image_descriptors(contents)
    assert not has_contrast(found).any()
    first, second = np.indices((len(found), len(found))).reshape(2, -1)
    assert not are_duplicates(found[first], found[second]).any()


@pytest.mark.parametrize("angle", [0.0, 0.25, 0.5, 1.0, 1.25])
def test_a_faint_smooth_picture_matches_its_copy(angle: float) -> None:
    """Its details are encoding noise, so their correlation must not decide."""
    y, x = np.mgrid[:96, :96] / 96
    values = 128 + 16 * (x * np.cos(angle) + y * np.sin(angle) - 0.5)
    image = Image.fromarray(np.rint(values).astype(np.uint8))
    picture, copy = image_descriptors([encoded(image), encoded(image, "JPEG", quality=50)])
    assert are_duplicates(picture[None], copy[None]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_undone(orientation: int) -> None:
    upright = drawn(5)
    turned = {
        1: upright,
        2: ImageOps.mirror(upright),
        3: upright.rotate(180),
        4: ImageOps.flip(upright),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    content = encoded(turned[orientation], "JPEG", quality=95, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        assert np.array(ImageOps.exif_transpose(image)).shape[:2] == np.array(upright).shape[:2]
    found, expected = image_descriptors([content, encoded(upright, "JPEG", quality=95)])
    assert np.bitwise_xor(found["phash"], expected["phash"]).item().bit_count() <= 4


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_every_pixel_mode_is_described(mode: str) -> None:
    picture = drawn(2)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    else:
        image = picture.convert(mode)
    content = encoded(image, "JPEG", quality=95) if mode == "CMYK" else encoded(image)
    plain = image_descriptors([encoded(image.convert("L")) if mode == "1" else encoded(picture)])
    assert are_duplicates(image_descriptors([content]), plain).all()


def test_transparent_pixels_are_white() -> None:
    over_white, hidden = drawn(0).convert("RGBA"), drawn(0).convert("RGBA")
    box = (0, 0, hidden.width, hidden.height // 2)
    over_white.paste((255, 255, 255, 255), box)
    hidden.paste((0, 0, 0, 0), box)
    found = image_descriptors([encoded(hidden), encoded(over_white.convert("RGB"))])
    assert found[0] == found[1]


@pytest.mark.parametrize("content", [b"", b"no image", encoded(drawn(0))[:500]])
def test_undecodable_images_are_blank(content: bytes) -> None:
    assert image_descriptors([content]) == np.zeros(1, DESCRIPTOR)


@pytest.mark.parametrize("max_pairs", [1, 7, 10_000])
def test_equal_keys_are_all_found(max_pairs: int) -> None:
    chance = np.random.default_rng(0)
    table, probes = np.sort(chance.integers(0, 30, 100)), chance.integers(0, 40, 50)
    pieces = list(equal_keys(table, probes, max_pairs=max_pairs))
    assert all(len(probe) <= max_pairs for probe, _ in pieces)
    found = {(p, t) for probe, entry in pieces for p, t in zip(probe, entry, strict=True)}
    assert found == {(p, t) for p in range(50) for t in range(100) if probes[p] == table[t]}
    assert sum(len(probe) for probe, _ in pieces) == len(found)
