from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.corpora.image_samples import encoded, png, small_samples
from tests.support.required import skip_or_fail
from vitscale.config.errors import UserError
from vitscale.images import crops, decoders
from vitscale.images.crops import CropBox, CropRequest
from vitscale.images.decoders import DECODERS, resolve_decoder

WIDTH, HEIGHT = 83, 61


def plain(box: CropBox, *, size: int | tuple[int, int] = 8, **more: Any) -> CropRequest:
    options = {"interpolation": "bilinear", "antialias": False, "flip": False} | more
    return CropRequest(box=box, size=size, **options)


def _require(name: str) -> None:
    why = decoders.missing(name)
    if why is None:
        return
    if name == "region":
        skip_or_fail(f"the region decoder does not work here: {why}")
    pytest.fail(why)


# The extension has vectors for one kind of processor, and a plain form for the others.
FORMS: dict[str, Callable[[], decoders.Decoder]] = {
    **DECODERS,
    "region without AVX2": lambda: decoders.RegionDecoder(allow_avx2=False),
}


def make(name: str) -> decoders.Decoder:
    _require(name.split()[0])
    return FORMS[name]()


@pytest.fixture(params=list(FORMS))
def decoder(request: pytest.FixtureRequest) -> decoders.Decoder:
    return make(request.param)


def picture(width: int, height: int, *, kind: str = "smooth", seed: int = 0) -> np.ndarray:
    """Colour waves, as smooth as a photograph, or noise."""
    random = np.random.default_rng(seed)
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width] / 20
    waves = [np.sin(x * a + y * b + c) for a, b, c in random.uniform(-2, 2, (3, 3))]
    return np.uint8(np.stack(waves, axis=-1) * 120 + 128)


CODINGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "4:1:1": {},
    "4:4:0": {},
    "4:2:0 progressive": {"subsampling": "4:2:0", "progressive": True},
    "4:4:4 progressive": {"subsampling": "4:4:4", "progressive": True},
    "restarts": {"subsampling": "4:2:0", "restart_marker_blocks": 2},
    "restarts inside rows": {"subsampling": "4:4:4", "restart_marker_blocks": 3},
    "RGB": {"keep_rgb": True},
    "coarse": {"subsampling": "4:2:0", "quality": 5},
    "fine": {"subsampling": "4:4:4", "quality": 100, "optimize": True},
    "grey": {},
}


def encode(pixels: np.ndarray, coding: str) -> bytes:
    if coding in ("4:1:1", "4:4:0"):  # Pillow cannot write these
        return simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), colorsubsampling=coding.replace(":", "")
        )
    image, file = Image.fromarray(pixels), io.BytesIO()
    (image.convert("L") if coding == "grey" else image).save(file, "JPEG", **CODINGS[coding])
    return file.getvalue()


BOXES = {
    "whole": CropBox(0, 0, WIDTH, HEIGHT),
    "left top corner": CropBox(0, 0, 20, 10),
    "right top corner": CropBox(WIDTH - 20, 0, 20, 10),
    "left bottom corner": CropBox(0, HEIGHT - 10, 20, 10),
    "right bottom corner": CropBox(WIDTH - 20, HEIGHT - 10, 20, 10),
    "on blocks": CropBox(16, 16, 32, 16),
    "off blocks": CropBox(17, 15, 31, 18),
    "a column": CropBox(33, 0, 1, HEIGHT),
    "a row": CropBox(0, 33, WIDTH, 1),
    "a pixel": CropBox(47, 31, 1, 1),
    "the first pixel": CropBox(0, 0, 1, 1),
    "the last pixel": CropBox(WIDTH - 1, HEIGHT - 1, 1, 1),
}


def reference(data: bytes, request: CropRequest) -> torch.Tensor:
    return crops.crop_and_resize(crops.decode(data), request)


@pytest.mark.parametrize("kind", ["smooth", "noise"])
@pytest.mark.parametrize("coding", CODINGS)
def test_every_box_holds_the_pixels_of_the_reference(
    decoder: decoders.Decoder, coding: str, kind: str
) -> None:
    """A box decoded alone equals the same box of the whole image, exactly."""
    data = encode(picture(WIDTH, HEIGHT, kind=kind), coding)
    assert decoder.size(data) == (WIDTH, HEIGHT)
    for name, box in BOXES.items():
        side = max(box.width, box.height)  # no reduction that could hide a difference
        request = plain(box, size=side)
        assert torch.equal(decoder.crop(data, request), reference(data, request)), name


def of_another_format(pixels: np.ndarray, kind: str) -> bytes:
    form, _, mode = kind.partition(" ")
    return encoded(Image.fromarray(pixels).convert(mode or "RGB"), form, lossless=True)


OTHERS = ("PNG", "PNG L", "PNG RGBA", "PNG LA", "PNG P", "PNG 1", "WEBP", "WEBP RGBA", "JPEG CMYK")


@st.composite
def crop_cases(draw: st.DrawFn) -> tuple[bytes, CropRequest]:
    width, height = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    box = CropBox(left, top, draw(st.integers(1, width - left)), draw(st.integers(1, height - top)))
    kind, seed = draw(st.sampled_from(["smooth", "noise"])), draw(st.integers(0, 9))
    pixels = picture(width, height, kind=kind, seed=seed)
    request = plain(
        box,
        size=(draw(st.integers(1, 70)), draw(st.integers(1, 70))),
        interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
        antialias=draw(st.booleans()),
        flip=draw(st.booleans()),
    )
    coding = draw(st.sampled_from([*CODINGS, *OTHERS]))
    return (of_another_format if coding in OTHERS else encode)(pixels, coding), request


@pytest.mark.parametrize("name", list(FORMS))
@settings(max_examples=300, deadline=None)
@given(case=crop_cases(), is_interleaved=st.booleans())
def test_any_box_of_any_image_equals_the_reference(
    name: str, case: tuple[bytes, CropRequest], is_interleaved: bool
) -> None:
    """Also in the row of a batch that is given, whatever the layout of its memory."""
    decoder = make(name)
    data, request = case
    expected = reference(data, request)
    assert decoder.size(data) == crops.decode(data).shape[1::-1]
    assert torch.equal(decoder.crop(data, request), expected)
    batch = torch.full((3, 3, *request.shape), 7, dtype=torch.uint8)
    if is_interleaved:
        batch = batch.contiguous(memory_format=torch.channels_last)
    assert decoder.crop(data, request, out=batch[1]).data_ptr() == batch[1].data_ptr()
    assert torch.equal(batch[1], expected) and (batch[[0, 2]] == 7).all()


@pytest.mark.parametrize("coding", ["4:2:0", "4:2:0 progressive", "grey", "restarts"])
def test_a_truncated_image_is_an_error_even_outside_the_box(
    decoder: decoders.Decoder, coding: str
) -> None:
    data = encode(picture(WIDTH, HEIGHT, kind="noise"), coding)
    for length in [*range(0, len(data) - 2, 97), len(data) - 2, len(data) - 1]:
        # With one byte missing Pillow still has every pixel, and so must the others.
        expected = _outcome(decoders.PillowDecoder(), data[:length], CropBox(0, 0, 8, 8))
        assert _outcome(decoder, data[:length], CropBox(0, 0, 8, 8)) == expected
        assert expected == "unreadable" or length == len(data) - 1


def _outcome(decoder: decoders.Decoder, data: bytes, box: CropBox) -> object:
    try:
        return decoder.crop(data, plain(box)).tolist()
    except (OSError, ValueError):
        return "unreadable"


@pytest.mark.parametrize(
    "coding", ["4:4:4", "4:2:0", "4:2:0 progressive", "restarts", "restarts inside rows", "grey"]
)
def test_damage_gives_pillows_pixels_or_an_error(decoder: decoders.Decoder, coding: str) -> None:
    """Lost data are filled in with the same pixels as by Pillow."""
    data, box = encode(picture(WIDTH, HEIGHT), coding), CropBox(20, 30, 40, 20)
    random = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(data)
        for place in random.integers(2, len(data) - 2, random.integers(1, 4)):
            broken[place] = random.integers(256)
        found, expected = (
            _outcome(d, bytes(broken), box) for d in (decoder, decoders.PillowDecoder())
        )
        assert found == expected or expected == "unreadable"


def test_damaged_png_and_webp_are_decided_by_pillow() -> None:
    rng, decoder = random.Random(0), decoders.SimpleJpegDecoder()
    samples = [d for n, d in small_samples().items() if n.startswith(("png", "webp"))]

    def whole(read: Callable[[bytes], torch.Tensor], data: bytes) -> object:
        try:
            return read(data).tolist()
        except (OSError, ValueError):
            return "unreadable"

    for _ in range(600):
        data = rng.choice(samples)
        changed = bytearray(data[: rng.choice([len(data), rng.randrange(1, len(data))])])
        for _ in range(rng.choice([1, 2, 8])):
            place = rng.randrange(min(rng.choice([60, len(data)]), len(changed)))
            changed[place] ^= 1 << rng.randrange(8)
        assert whole(decoder.whole, bytes(changed)) == whole(crops.decode, bytes(changed))


def test_ordinary_webp_is_not_left_to_pillow() -> None:
    """The pixels do not show which decoder was used."""
    fast = {n for n, d in small_samples().items() if decoders.decode_webp(d) is not None}
    assert fast == {"webp", "webp smooth", "webp lossless", "webp lossless rgba"}


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_a_header_that_claims_too_much_is_refused(kind: str) -> None:
    decoder, data = decoders.SimpleJpegDecoder(), small_samples()["webp lossless"]
    data = data[:21] + b"\xff" * 4 + data[25:]
    if kind == "png":
        data = png(20_000, 20_000, rows=bytes(1000))
    for read in (decoder.size, decoder.whole):
        with pytest.raises((OSError, ValueError)):
            read(data)


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_a_huge_image_is_refused_before_it_is_decoded(
    decoder: decoders.Decoder, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None: as data_prep, in the same process, leaves it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    data = bytearray(encode(picture(WIDTH, HEIGHT), "4:4:4"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (65_000).to_bytes(2, "big") * 2
    with pytest.raises(ValueError):
        decoder.size(bytes(data))
    with pytest.raises(ValueError):
        decoder.crop(bytes(data), plain(CropBox(0, 0, 64, 64)))


@pytest.mark.parametrize(
    "box",
    [
        CropBox(0, 0, WIDTH + 1, 1),
        CropBox(0, 0, 1, HEIGHT + 1),
        CropBox(WIDTH, 0, 1, 1),
        CropBox(-1, 0, 2, 2),
        CropBox(0, -1, 2, 2),
        CropBox(0, 0, 0, 5),
        CropBox(0, 0, 5, 0),
        CropBox(2**31, 0, 2**33, 1),
        CropBox(2**64, 0, 1, 1),
    ],
    ids=str,
)
def test_a_box_outside_the_image_is_refused(decoder: decoders.Decoder, box: CropBox) -> None:
    with pytest.raises(ValueError):
        decoder.crop(encode(picture(WIDTH, HEIGHT), "4:2:0"), plain(box))


ORDINARY = {"4:4:4", "4:2:2", "4:2:0", "restarts", "restarts inside rows", "coarse", "fine", "grey"}


@pytest.mark.parametrize("coding", CODINGS)
def test_ordinary_images_are_decoded_without_libjpeg(coding: str) -> None:
    """Both decoders give the same pixels, so the pixels do not show which was used."""
    if not _has_vectors():
        pytest.skip("this processor has no AVX2 and BMI2")
    for kind in ("smooth", "noise"):
        took, _ = _both_ways(encode(picture(WIDTH, HEIGHT, kind=kind), coding), BOXES["off blocks"])
        assert took == (coding in ORDINARY)


@pytest.mark.parametrize("coding", sorted(ORDINARY))
def test_damaged_images_give_the_pixels_of_libjpeg_or_none(coding: str) -> None:
    """For any bytes, our own decoder gives libjpeg's pixels or refuses."""
    if not _has_vectors():
        pytest.skip("this processor has no AVX2 and BMI2")
    data, random = encode(picture(129, 70, kind="noise"), coding), np.random.default_rng(3)
    start = data.index(b"\xff\xda") + 14
    num_taken = num_left = 0
    for _ in range(200):
        broken = bytearray(data)
        place = int(random.integers(start, len(data) - 2))
        kind = random.integers(3)
        if kind == 0:
            broken[place] = random.integers(256)
        elif kind == 1:
            del broken[place : place + int(random.integers(1, 9))]
        else:
            broken[place:place] = random.bytes(int(random.integers(1, 9)))
        box = CropBox(*(int(random.integers(low)) for low in (100, 50)), 25, 18)
        took, same = _both_ways(bytes(broken), box)
        assert same
        num_taken, num_left = num_taken + took, num_left + (not took)
    assert num_taken > 20 and num_left > 20


def _has_vectors() -> bool:
    _require("region")
    with open("/proc/cpuinfo") as lines:
        return {"avx2", "bmi1", "bmi2"} <= set(lines.read().split())


def _both_ways(data: bytes, box: CropBox) -> tuple[bool, bool]:
    """Whether our own decoder was used, and whether libjpeg gives the same pixels or none."""
    side, took, found = max(box.width, box.height), False, []
    for allowed in (True, False):
        pixels = np.zeros((3, side, side), np.uint8)
        try:
            took |= decoders.decode_region(data, plain(box, size=side), pixels, allow_avx2=allowed)
        except ValueError:
            break
        found.append(pixels)
    return took, len(found) < 2 or np.array_equal(*found)


def test_a_machine_without_the_extension_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vitscale.images.jpeg._region", None)
    monkeypatch.delattr("vitscale.images.jpeg._region", raising=False)
    decoders.missing.cache_clear()
    try:
        with pytest.raises(UserError, match="libjpeg-dev") as error:
            resolve_decoder("region")
        assert "auto, region, simplejpeg, pillow" in str(error.value)
        assert resolve_decoder("auto") == "simplejpeg"
    finally:
        decoders.missing.cache_clear()
