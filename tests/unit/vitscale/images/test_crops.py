"""Crop boxes and resampling against plain reference versions."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

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


@pytest.mark.parametrize("draw_box", [random_crop_box, tf_crop_box])
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    low=st.floats(0.01, 1),
    key=st.integers(0, 2**63),
)
def test_random_crops_lie_inside_the_image(
    draw_box: Callable[..., CropBox], width: int, height: int, low: float, key: int
) -> None:
    box = draw_box(width, height, area=(low, 1.0), aspect=(3 / 4, 4 / 3), random=CounterRandom(key))
    assert box.width > 0 and box.height > 0
    assert 0 <= box.left <= box.left + box.width <= width
    assert 0 <= box.top <= box.top + box.height <= height
    if draw_box is tf_crop_box:
        assert box.width * box.height >= low * width * height


@pytest.mark.parametrize(
    "width, height, expected",
    [(1000, 10, CropBox(493, 0, 13, 10)), (10, 1000, CropBox(0, 493, 10, 13))],
)
def test_without_a_fitting_draw_the_crop_is_centred(
    width: int, height: int, expected: CropBox
) -> None:
    random = CounterRandom(0)
    box = random_crop_box(width, height, area=(0.05, 1), aspect=(3 / 4, 4 / 3), random=random)
    assert box == expected


# Sizes as ImageNet's: mostly 500 px wide, 3:2 and 4:3, some upright, square or large.
SIZES = [(500, 375)] * 5 + [(500, 333)] * 3 + [(375, 500)] * 2 + [(500, 500), (2048, 1536)]


def slow_tf_crop(
    width: int, height: int, draw: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """(left, top, width, height) of one attempt, in single precision as TensorFlow computes it."""
    f32 = np.float32
    aspect = f32(0.75) + f32(draw.random()) * f32(1.33 - 0.75)
    least, most = f32(0.05) * f32(width) * f32(height), f32(width) * f32(height)
    smallest, tallest = (int(np.rint(np.sqrt(a / aspect))) for a in (least, most))
    fits = np.rint(np.arange(height + 1, dtype=f32) * aspect) <= width
    tallest = min(tallest, int(np.flatnonzero(fits)[-1]))
    crop_height = int(draw.integers(min(smallest, tallest), tallest + 1))
    for correction in (0, 1, -1):
        crop_width = int(np.rint(f32(crop_height + correction) * aspect))
        if least <= crop_width * (crop_height + correction) <= most:
            crop_height += correction
            break
    else:
        return None
    if crop_width > width or crop_height > height:
        return None
    # The last place of each axis is never drawn, unless it is the only one.
    left, top = (
        int(draw.integers(max(1, room))) for room in (width - crop_width, height - crop_height)
    )
    return left, top, crop_width, crop_height


def test_tf_crops_are_distributed_as_tensorflows() -> None:
    """Area, aspect and place, by their quantiles; 0.332 of the area on average."""
    draw, ours, theirs = np.random.default_rng(0), [], []
    for key in range(12_000):
        width, height = SIZES[key % len(SIZES)]
        box = tf_crop_box(
            width, height, area=(0.05, 1.0), aspect=(0.75, 1.33), random=CounterRandom(key << 20)
        )
        attempts = (slow_tf_crop(width, height, draw) for _ in range(100))
        slow = next((found for found in attempts if found), (0, 0, width, height))
        for boxes, (x, y, w, h) in (
            (ours, (box.left, box.top, box.width, box.height)),
            (theirs, slow),
        ):
            boxes.append((w * h / width / height, w / h, x / width, y / height))
    own, other = np.array(ours), np.array(theirs)
    for column in range(4):
        places = np.sort(np.concatenate([own[:, column], other[:, column]]))
        shares = [
            np.searchsorted(np.sort(a[:, column]), places, side="right") for a in (own, other)
        ]
        # Kolmogorov-Smirnov at 1e-6: sqrt(ln(2e6) / n).
        assert np.abs(shares[0] - shares[1]).max() / len(own) < np.sqrt(np.log(2e6) / len(own))
    area = own[:, 0]
    assert area.mean() == pytest.approx(other[:, 0].mean(), abs=0.012)
    assert area.mean() == pytest.approx(0.332, abs=0.01)
    for limit, share in ((0.10, 0.13), (0.25, 0.44), (0.50, 0.77)):
        assert (area < limit).mean() == pytest.approx((other[:, 0] < limit).mean(), abs=0.02)
        assert (area < limit).mean() == pytest.approx(share, abs=0.02)


def slow_area_mean(pixels_HW3: np.ndarray, y: tuple[float, float], x: tuple[float, float]) -> float:
    """The mean red of a rectangle with fractional edges, pixel by pixel."""
    total = 0.0
    for row in range(int(y[0]), min(len(pixels_HW3), int(np.ceil(y[1])))):
        for column in range(int(x[0]), min(len(pixels_HW3[0]), int(np.ceil(x[1])))):
            covered_y = min(row + 1, y[1]) - max(row, y[0])
            covered_x = min(column + 1, x[1]) - max(column, x[0])
            total += covered_y * covered_x * float(pixels_HW3[row, column, 0])
    return total / (y[1] - y[0]) / (x[1] - x[0])


@pytest.mark.parametrize("resized, size", [((7, 7), 7), ((9, 12), 7), ((40, 54), 40)])
def test_area_resize_equals_the_slow_formula(resized: tuple[int, int], size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
    own = area_resized(torch.from_numpy(pixels), resized=resized, size=size)
    assert own.shape == (3, size, size) and own.dtype == torch.uint8
    (rows, columns), scale = resized, (23 / resized[0], 31 / resized[1])
    for row in range(size):
        for column in range(size):
            top, left = row + (rows - size) // 2, column + (columns - size) // 2
            expected = slow_area_mean(
                pixels,
                (top * scale[0], (top + 1) * scale[0]),
                (left * scale[1], (left + 1) * scale[1]),
            )
            assert abs(int(own[0, row, column]) - expected) <= 0.5 + 1e-3


def plain_crop(pixels_HW3: torch.Tensor, *, size: int, key: int) -> torch.Tensor:
    height, width, _ = pixels_HW3.shape
    box, right, down = plain_crop_box(width, height, size=size, random=CounterRandom(key))
    assert box.width == box.height == min(width, height)
    assert 0 <= box.left <= width - box.width and 0 <= box.top <= height - box.height
    request = CropRequest(box=box, size=size, interpolation="bicubic", antialias=True, flip=False)
    crop = crop_and_resize(pixels_HW3, request)
    return reflected(crop, right=right, down=down)


@pytest.mark.parametrize("width, height", [(24, 16), (16, 21), (16, 16)])
def test_plain_crop_is_a_crop_of_the_reflected_image(width: int, height: int) -> None:
    """DeiT-III's: RandomCrop(size, padding=4, padding_mode="reflect"), every offset as likely."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    padded = np.pad(pixels.numpy(), ((4, 4), (4, 4), (0, 0)), mode="reflect").transpose(2, 0, 1)
    windows = {
        padded[:, y : y + 16, x : x + 16].tobytes(): (x, y)
        for y in range(height - 7)
        for x in range(width - 7)
    }
    found = [windows[plain_crop(pixels, size=16, key=key).numpy().tobytes()] for key in range(3000)]
    for axis, length in enumerate((width, height)):
        counts = np.bincount([place[axis] for place in found], minlength=length - 7)
        expected = 3000 / (length - 7)
        assert len(counts) == length - 7
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_squash_crop_has_its_share_at_every_place() -> None:
    boxes = [squash_crop_box(32, 20, share=0.8, random=CounterRandom(key)) for key in range(2000)]
    assert {(box.width, box.height) for box in boxes} == {(26, 16)}
    places = Counter((box.left, box.top) for box in boxes)
    assert places.keys() == {(x, y) for x in range(7) for y in range(5)}
    assert max(places.values()) < 2 * min(places.values()) + 30
    assert squash_crop_box(7, 5, share=1.0, random=CounterRandom(0)) == CropBox(0, 0, 7, 5)


def test_the_centre_of_a_very_long_image_is_cut_first() -> None:
    """Resized whole, 20,000 x 2 pixels would become 2,240,000 x 224."""
    expected = CropBox(9984, 0, 32, 2), (224, 16 * 224), (0, 1680)
    assert center_crop(20_000, 2, size=224, fraction=1.0) == expected
    assert center_crop(2, 20_000, size=224, fraction=1.0)[1] == (16 * 224, 224)


def test_decode_refuses_other_formats() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    with pytest.raises(OSError):
        decode(file.getvalue())


def png() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (240, 240, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_damage_raises_only_oserror_or_valueerror() -> None:
    """For a broken chunk Pillow raises SyntaxError, which is neither OSError nor ValueError."""
    data = png()
    kinds = set()
    for start in range(0, len(data), 512):
        damaged = data[:start] + bytes(512) + data[start + 512 :]
        try:
            decode(damaged)
        except (OSError, ValueError) as error:
            kinds.add(str(error).partition(":")[0])
    assert "SyntaxError" in kinds


def test_a_memory_error_is_not_an_unreadable_image() -> None:
    with pytest.raises(MemoryError), open_image(png()):
        raise MemoryError
