"""Crop boxes and resampling against plain reference versions."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.support.corpora.image_samples import encoded, photograph
from tests.support.tables import every, rows
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images.crops import (
    CropBox,
    CropRequest,
    area_resized,
    center_crop,
    crop_and_resize,
    decode,
    open_image,
    plain_crop_box,
    random_crop_box,
    reflected,
    squash_crop_box,
    tf_crop_box,
)

PHOTO = photograph(40, 30)
LEVELS = np.random.default_rng(0).integers(0, 255, (240, 240, 3), np.uint8)
NOISE = Image.fromarray(LEVELS)


@every(draw_box=[random_crop_box, tf_crop_box])
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    low=st.floats(0.01, 1),
    key=st.integers(0, 2**63),
)
def test_random_crops_lie_inside_the_image(draw_box, width, height, low, key):
    random = CounterRandom(key)
    box = draw_box(
        width,
        height,
        area=(low, 1.0),
        aspect=(3 / 4, 4 / 3),
        random=random,
    )
    assert box.width > 0
    assert box.height > 0
    assert 0 <= box.left <= box.left + box.width <= width
    assert 0 <= box.top <= box.top + box.height <= height

    # TensorFlow checks the area after rounding; torchvision may come out below the least one.
    if draw_box is tf_crop_box:
        assert box.width * box.height >= low * width * height


def test_without_a_fitting_draw_the_crop_is_centred():
    # A strip: a box of 4:3 as high or as wide as it, in the middle.
    options = {"area": (0.05, 1), "aspect": (3 / 4, 4 / 3)}
    for sizes, expected in (
        ((1000, 10), CropBox(493, 0, 13, 10)),
        ((10, 1000), CropBox(0, 493, 10, 13)),
    ):
        box = random_crop_box(*sizes, **options, random=CounterRandom(0))
        assert box == expected


# Sizes as ImageNet's: mostly 500 px wide, 3:2 and 4:3, some upright, square or large.
SIZES = [(500, 375)] * 5
SIZES += [(500, 333)] * 3
SIZES += [(375, 500)] * 2
SIZES += [(500, 500), (2048, 1536)]


def test_tf_crops_are_distributed_as_tensorflows():
    """Statistics of 12,000 boxes by a copy of TensorFlow's kernel in single precision."""
    boxes = []
    for key in range(12_000):
        width, height = SIZES[key % len(SIZES)]
        # Keys far apart, like those of samples, which are hashes.
        random = CounterRandom(key << 20)
        box = tf_crop_box(
            width,
            height,
            area=(0.05, 1.0),
            aspect=(0.75, 1.33),
            random=random,
        )
        area = box.width * box.height / width / height
        aspect = box.width / box.height
        boxes.append((area, aspect, box.left / width, box.top / height))

    # Area, aspect, left and top: their means and quartiles.
    values = np.array(boxes)
    assert values.mean(axis=0) == pytest.approx([0.332, 1.039, 0.245, 0.2], abs=0.01)
    lower, upper = np.quantile(values, [0.25, 0.75], axis=0)
    assert lower == pytest.approx([0.149, 0.897, 0.092, 0.057], abs=0.015)
    assert upper == pytest.approx([0.489, 1.184, 0.370, 0.306], abs=0.015)

    # Many small boxes and few large ones: the area is not uniform.
    areas = values[:, 0]
    for limit, share in ((0.10, 0.13), (0.25, 0.44), (0.50, 0.77)):
        assert (areas < limit).mean() == pytest.approx(share, abs=0.02)


# Squashed to a square; the long side cut; and enlarged, where areas are parts of pixels.
@rows("""
- [resized, size]
- [[7, 7], 7]
- [[9, 12], 7]
- [[40, 54], 40]
""")
def test_area_resize_averages_areas(resized, size):
    """Each pixel as many times as there are rows and columns of the result: areas become whole."""
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
    own = area_resized(torch.from_numpy(pixels), resized=resized, size=size)
    rows, columns = resized
    fine = pixels.repeat(rows, axis=0).repeat(columns, axis=1)
    areas = fine.reshape(rows, 23, columns, 31, 3)
    means = areas.mean(axis=(1, 3))

    # The result is the middle of it.
    top = (rows - size) // 2
    left = (columns - size) // 2
    expected = means[top : top + size, left : left + size].transpose(2, 0, 1)
    assert own.dtype == torch.uint8
    assert own.shape == expected.shape

    # Rounded to the nearest level.
    assert np.abs(own.numpy() - expected).max() <= 0.5 + 1e-3


def plain_crop(pixels_HW3, *, size, key):
    """The crop as training makes it: a box, a resize, and a shift with reflection."""
    height, width, _ = pixels_HW3.shape
    random = CounterRandom(key)
    box, right, down = plain_crop_box(width, height, size=size, random=random)
    assert box.width == box.height == min(width, height)
    assert 0 <= box.left <= width - box.width
    assert 0 <= box.top <= height - box.height
    request = CropRequest(
        box=box,
        size=size,
        interpolation="bicubic",
        antialias=True,
        flip=False,
    )
    crop = crop_and_resize(pixels_HW3, request)
    return reflected(crop, right=right, down=down)


# The short side has 16 pixels already, so the resize changes nothing.
@rows("""
- [width, height]
- [24, 16]
- [16, 21]
- [16, 16]
""")
def test_plain_crop_is_a_crop_of_the_reflected_image(width, height):
    """DeiT-III's: RandomCrop(size, padding=4, padding_mode="reflect"), every offset as likely."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=generator, dtype=torch.uint8
    )

    # Every window of the padded image, which its bytes identify.
    margins = ((4, 4), (4, 4), (0, 0))
    padded = np.pad(pixels.numpy(), margins, mode="reflect").transpose(2, 0, 1)
    windows = {}
    for y in range(height - 7):
        for x in range(width - 7):
            window = padded[:, y : y + 16, x : x + 16]
            windows[window.tobytes()] = (x, y)

    # A crop that is none of them is a KeyError.
    num_crops = 3000
    offsets = []
    for key in range(num_crops):
        crop = plain_crop(pixels, size=16, key=key)
        offsets.append(windows[crop.numpy().tobytes()])

    # Five standard deviations of a count.
    for axis, length in enumerate((width, height)):
        num_offsets = length - 7
        along_axis = [offset[axis] for offset in offsets]
        counts = np.bincount(along_axis, minlength=num_offsets)
        expected = num_crops / num_offsets
        assert len(counts) == num_offsets
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_squash_crop_has_its_share_at_every_place():
    boxes = []
    for key in range(2000):
        random = CounterRandom(key)
        boxes.append(squash_crop_box(32, 20, share=0.8, random=random))

    # 0.8 of both sides, so 6 and 4 pixels are left to move in.
    sizes = {(box.width, box.height) for box in boxes}
    assert sizes == {(26, 16)}
    places = Counter((box.left, box.top) for box in boxes)
    assert places.keys() == set(product(range(7), range(5)))
    counts = places.values()
    assert max(counts) < 2 * min(counts) + 30

    # The whole image has one place.
    whole = squash_crop_box(7, 5, share=1.0, random=CounterRandom(0))
    assert whole == CropBox(0, 0, 7, 5)


def test_the_centre_of_a_very_long_image_is_cut_first():
    """Resized whole, 20,000 x 2 pixels would become 2,240,000 x 224."""
    # 16 times as long as it is high at most, from which the middle is cut after the resize.
    first_cut = CropBox(9984, 0, 32, 2)
    crop = center_crop(20_000, 2, size=224, fraction=1.0)
    assert crop == (first_cut, (224, 16 * 224), (0, 1680))

    _, resized, _ = center_crop(2, 20_000, size=224, fraction=1.0)
    assert resized == (16 * 224, 224)


def test_what_cannot_be_read_raises_oserror_or_valueerror():
    """For a broken chunk Pillow raises SyntaxError, which is neither; BMP is no format here."""
    data = encoded(NOISE, "PNG")
    kinds = set()
    for start in range(0, len(data), 512):
        end = start + 512
        damaged = data[:start] + bytes(512) + data[end:]
        try:
            decode(damaged)
        except (OSError, ValueError) as error:
            kinds.add(str(error).partition(":")[0])

    # The text still says what Pillow raised.
    assert "SyntaxError" in kinds
    for bad in (b"", b"no image", data[:200], encoded(PHOTO, "BMP")):
        with pytest.raises((OSError, ValueError)):
            decode(bad)

    # A lack of memory is no fault of the image, which must not be replaced for it.
    with pytest.raises(MemoryError), open_image(data):
        raise MemoryError
