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
from tests.support.tables import rows
from vitscale.images import crops
from vitscale.images.crops import CropBox
from vitscale.images.jpeg.entry_points import find_entry_points


@st.composite
def several(draw):
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
@settings(max_examples=50, deadline=None)
@given(case=several())
def test_each_crop_has_the_pixels_of_pillow(name, case):
    data, requests = case
    outs = [torch.zeros((3, *request.shape), dtype=torch.uint8) for request in requests]
    make(name).crops(data, requests, outs)

    # Pillow decodes the whole image, and torch resamples each box of it.
    pixels = crops.decode(data)
    for request, out in zip(requests, outs, strict=True):
        assert torch.equal(out, crops.crop_and_resize(pixels, request))


@rows("""
- [boxes, columns, problem]
- [[], 8, 1 to 64 boxes]
- [[[0, 0, 8, 8], [60, 0, 8, 8]], 8, inside the image]
- [[[0, 0, 8, 8], [0, 0, 0, 8]], 8, inside the image]
- [[[0, 0, 8, 8]], 7, size of the output]
""")
def test_what_the_extension_refuses(boxes, columns, problem):
    """A box that the image lacks, and a buffer with less room than the pixels need."""
    make("region")
    data = encode(picture(64, 48), "4:2:0")
    given = []
    for box in boxes:
        out = np.zeros((3, 8, columns), np.uint8)
        given.append((tuple(box), out, 8, False, False, False))
    with pytest.raises(ValueError, match=problem):
        crops._extension().crop(data, given, crops.MAX_PIXELS, True, b"")
    with pytest.raises(ValueError, match="1 to 64 boxes"):
        crops._extension().crop(data, given * 65, crops.MAX_PIXELS, True, b"")


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("coding", [*CODINGS, *OTHERS])
def test_a_box_that_begins_or_ends_with_a_block_has_the_colours_of_its_neighbours(
    name, coding
):
    """Colours at its edge are interpolated with those beyond, so these must be decoded, too."""
    decoder = make(name)
    data = encode(picture(96, 80, kind="noise", seed=3), coding)
    pixels = crops.decode(data)
    for left, top in ((16, 16), (32, 8), (8, 32)):
        box = CropBox(left, top, 32, 32)
        request = request_of(box, size=32)
        expected = crops.crop_and_resize(pixels, request)
        assert torch.equal(decoder.crop(data, request), expected)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("every", [0, 1, 3])
def test_boxes_that_lie_apart_have_their_own_pixels(coding, every):
    """What lies between them is not decoded, but the neighbours of their edges are.

    every: MCUs from one entry point to the next; 0: none.
    """
    data = encode(picture(160, 112, kind="noise", seed=5), coding)
    points = find_entry_points(data, every=every) if every else b""
    pixels = crops.decode(data)

    # The first two begin and end with a block; others share rows with them, or columns.
    boxes = [
        CropBox(112, 64, 32, 32),
        CropBox(16, 16, 32, 32),
        CropBox(129, 3, 30, 25),
        CropBox(3, 90, 9, 21),
    ]
    requests = [request_of(box, size=32, entry_points=points) for box in boxes]
    outs = [torch.zeros((3, 32, 32), dtype=torch.uint8) for _ in boxes]
    make("region").crops(data, requests, outs)
    for request, out in zip(requests, outs, strict=True):
        assert torch.equal(out, crops.crop_and_resize(pixels, request))
