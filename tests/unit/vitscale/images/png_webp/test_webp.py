"""WebP: the same sizes and pixels as Pillow, and nothing read that Pillow refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from tests.support.corpora.image_samples import encoded, pixels, rotated, small_samples, smooth
from vitscale.images import crops
from vitscale.images.decoders import RegionDecoder
from vitscale.images.png_webp import webp

PHOTO = Image.fromarray(smooth())
KINDS = {
    "webp lossless": encoded(PHOTO, "WEBP", lossless=True),
    "webp lossy": encoded(PHOTO, "WEBP", quality=80),
    "webp with exif": encoded(PHOTO, "WEBP", exif=rotated(3)),
    "webp alpha": encoded(Image.fromarray(pixels(4)), "WEBP"),
    **{n: d for n, d in small_samples().items() if n.startswith("webp")},
}


@pytest.mark.parametrize("name", KINDS)
def test_sizes_and_pixels_equal_those_of_pillow(name: str) -> None:
    expected = crops.decode(KINDS[name])
    decoder = RegionDecoder()
    assert decoder.size(KINDS[name]) == (expected.shape[1], expected.shape[0])
    assert decoder.whole(KINDS[name]).equal(expected)


def test_ordinary_webp_is_not_left_to_pillow() -> None:
    for name in ("webp lossless", "webp lossy"):
        assert webp.whole(KINDS[name], max_pixels=crops.MAX_PIXELS) is not None


def test_decompression_bombs_are_refused() -> None:
    lossless = KINDS["webp lossless"]
    data = lossless[:21] + b"\xff" * 4 + lossless[25:]
    for read in (RegionDecoder().size, RegionDecoder().whole):
        with pytest.raises((OSError, ValueError)):
            read(data)


def test_damaged_files_give_the_pixels_of_pillow_or_an_error() -> None:
    rng, decoder = random.Random(0), RegionDecoder()

    def tried(read: object, data: bytes) -> np.ndarray | None:
        try:
            return read(data).numpy()
        except (OSError, ValueError):
            return None

    for data in KINDS.values():
        for _ in range(30):
            damaged = bytearray(data[: rng.choice([len(data), rng.randrange(1, len(data))])])
            for _ in range(rng.choice([1, 2, 8])):
                place = rng.randrange(min(rng.choice([60, len(damaged)]), len(damaged)))
                damaged[place] ^= 1 << rng.randrange(8)
            expected, found = (tried(f, bytes(damaged)) for f in (crops.decode, decoder.whole))
            assert (found is None) == (expected is None)
            assert found is None or np.array_equal(found, expected)
