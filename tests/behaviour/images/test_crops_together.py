"""Several boxes of an image in one decode: each has the pixels that it has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.behaviour.images.test_decoders import (
    CODINGS,
    FORMS,
    OTHERS,
    encode,
    make,
    picture,
    request_of,
)
from vitscale.images import crops
from vitscale.images.crops import CropBox, CropRequest
from vitscale.images.jpeg.entry_points import find_entry_points


@st.composite
def several(draw: st.DrawFn) -> tuple[bytes, list[CropRequest]]:
    """An image, and boxes that overlap, lie apart, touch its edges or are the same."""
    width = draw(st.integers(1, 90))
    height = draw(st.integers(1, 70))
    kind = draw(st.sampled_from(["smooth", "noise"]))
    coding = draw(st.sampled_from([*CODINGS, *OTHERS]))
    data = encode(picture(width, height, kind=kind, seed=3), coding)
    points = find_entry_points(data, every=draw(st.sampled_from([1, 3])))

    requests = []
    for _ in range(draw(st.integers(1, 6))):
        left = draw(st.integers(0, width - 1))
        top = draw(st.integers(0, height - 1))
        box = CropBox(
            left,
            top,
            draw(st.integers(1, width - left)),
            draw(st.integers(1, height - top)),
        )
        requests.append(
            request_of(
                box,
                size=draw(st.integers(1, 40)),
                interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
                antialias=draw(st.booleans()),
                flip=draw(st.booleans()),
                entry_points=points,
            )
        )
    return data, requests


@pytest.mark.parametrize("name", list(FORMS))
@settings(max_examples=150, deadline=None)
@given(case=several())
def test_each_crop_has_the_pixels_of_pillow(
    name: str, case: tuple[bytes, list[CropRequest]]
) -> None:
    data, requests = case
    outs = [torch.zeros((3, *request.shape), dtype=torch.uint8) for request in requests]
    make(name).crops(data, requests, outs)

    # Pillow decodes the whole image, and torch resamples each box of it.
    pixels = crops.decode(data)
    for request, out in zip(requests, outs, strict=True):
        assert torch.equal(out, crops.crop_and_resize(pixels, request))


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([], "1 to 64 boxes"),
        ([CropBox(0, 0, 8, 8)] * 65, "1 to 64 boxes"),
        ([CropBox(0, 0, 8, 8), CropBox(60, 0, 8, 8)], "inside the image"),
        ([CropBox(0, 0, 8, 8), CropBox(0, 0, 0, 8)], "inside the image"),
    ],
    ids=["none", "too many", "one beyond the edge", "an empty one"],
)
def test_what_the_extension_refuses(boxes: list[CropBox], problem: str) -> None:
    """One bad box of several: none of the outputs may be taken for pixels."""
    make("region")
    data = encode(picture(64, 48), "4:2:0")
    given = []
    for box in boxes:
        place = (box.left, box.top, box.width, box.height)
        out = np.zeros((3, 8, 8), np.uint8)
        given.append((place, out, 8, False, False, False))
    with pytest.raises(ValueError, match=problem):
        crops._extension().crop(data, given, crops.MAX_PIXELS, True, b"")


def test_a_buffer_of_another_size_is_refused() -> None:
    """The extension writes as many bytes as the size says, so the buffer must have them."""
    make("region")
    data = encode(picture(64, 48), "4:2:0")
    request = request_of(CropBox(0, 0, 8, 8), size=8)
    outs = [np.zeros((3, 8, 8), np.uint8), np.zeros((3, 8, 7), np.uint8)]
    with pytest.raises(ValueError, match="size of the output"):
        crops.decode_regions(data, [request, request], outs)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("coding", [*CODINGS, *OTHERS])
def test_a_box_that_begins_or_ends_with_a_block_has_the_colours_of_its_neighbours(
    name: str, coding: str
) -> None:
    """Colours at its edge are interpolated with those beyond, so these must be decoded, too."""
    decoder = make(name)
    data = encode(picture(96, 80, kind="noise", seed=3), coding)
    pixels = crops.decode(data)
    for left, top, right, bottom in (
        (16, 16, 48, 48),
        (32, 8, 64, 40),
        (8, 32, 40, 64),
    ):
        box = CropBox(left, top, right - left, bottom - top)
        request = request_of(box, size=32)
        expected = crops.crop_and_resize(pixels, request)
        assert torch.equal(decoder.crop(data, request), expected)
