"""All decoders give Pillow's pixels, or its error, for any crop of any bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.corpora.image_samples import encoded, png, small_samples
from tests.support.levels import skip_or_fail
from tests.support.tables import Values, refused, rows, words
from vitscale.images import crops
from vitscale.images.crops import (
    DECODERS,
    CropBox,
    CropRequest,
    Decoder,
    resolve_decoder,
)
from vitscale.images.jpeg import entry_points
from vitscale.images.jpeg.entry_points import (
    entry_points_file,
    find_entry_points,
    read_entry_points,
    require_entry_points,
    write_entry_points,
)

WIDTH, HEIGHT = 83, 61


class WithoutAVX2(crops.RegionDecoder):
    allow_avx2 = False


# The extension has vectors for one kind of processor, and a plain form for the others.
FORMS: dict[str, Callable[[], Decoder]] = {
    **DECODERS,
    "region without AVX2": WithoutAVX2,
}


class Pillow(Decoder):
    def whole(self, data: bytes) -> torch.Tensor:
        return crops.decode(data)


def make(name: str) -> Decoder:
    if why := crops.missing(name.split()[0]):
        skip_or_fail(f"{name} does not work here: {why}")
    return FORMS[name]()


@pytest.fixture(params=list(FORMS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make(request.param)


@pytest.fixture
def vectors() -> None:
    """Our own decoder of ordinary JPEGs, and entry points, need AVX2 and BMI2."""
    make("region")
    require_entry_points(where="this machine")


def request_of(
    box: CropBox, *, size: int | tuple[int, int] = 8, **more: Any
) -> CropRequest:
    options = {"interpolation": "bilinear", "antialias": False, "flip": False} | more
    return CropRequest(box=box, size=size, **options)


def outcome(decoder: Decoder, data: bytes, request: CropRequest) -> object:
    try:
        return decoder.crop(data, request).tolist()
    except (OSError, ValueError):
        return "unreadable"


def picture(
    width: int, height: int, *, kind: str = "smooth", seed: int = 0
) -> np.ndarray:
    """Colour waves, as smooth as a photograph, or noise."""
    random = np.random.default_rng(seed)
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width] / 20
    waves = [np.sin(x * a + y * b + c) for a, b, c in random.uniform(-2, 2, (3, 3))]
    return np.uint8(np.stack(waves, axis=-1) * 120 + 128)


# Those that our own decoder takes, without and with restart markers; others go to libjpeg.
ORDINARY: dict[str, Values] = yaml.safe_load("""
"4:4:4": {subsampling: "4:4:4"}
"4:2:2": {subsampling: "4:2:2"}
"4:2:0": {subsampling: "4:2:0"}
coarse: {subsampling: "4:2:0", quality: 5}
fine: {subsampling: "4:4:4", quality: 100, optimize: true}
grey: {}
""")
RESTARTS: dict[str, Values] = yaml.safe_load("""
restarts: {subsampling: "4:2:0", restart_marker_blocks: 2}
restarts inside rows: {subsampling: "4:4:4", restart_marker_blocks: 3}
""")
UNUSUAL: dict[str, Values] = yaml.safe_load("""
"4:1:1": {}
"4:4:0": {}
4:2:0 progressive: {subsampling: "4:2:0", progressive: true}
4:4:4 progressive: {subsampling: "4:4:4", progressive: true}
RGB: {keep_rgb: true}
""")
CODINGS = ORDINARY | RESTARTS | UNUSUAL
OTHERS = "PNG|PNG L|PNG RGBA|PNG LA|PNG P|PNG 1|WEBP|WEBP RGBA|JPEG CMYK".split("|")


def encode(pixels: np.ndarray, coding: str) -> bytes:
    if coding in OTHERS:
        form, _, mode = coding.partition(" ")
        return encoded(
            Image.fromarray(pixels).convert(mode or "RGB"), form, lossless=True
        )
    if coding in ("4:1:1", "4:4:0"):  # Pillow cannot write these
        return simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), colorsubsampling=coding.replace(":", "")
        )
    image = Image.fromarray(pixels)
    return encoded(
        image.convert("L") if coding == "grey" else image, "JPEG", **CODINGS[coding]
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, bytes, CropRequest, bool]:
    """An image, the same after damage, what is wanted of it, and whether it was only cut."""
    width, height = draw(st.integers(1, 140)), draw(st.integers(1, 70))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    box = CropBox(
        left,
        top,
        draw(st.integers(1, width - left)),
        draw(st.integers(1, height - top)),
    )
    kind, seed = draw(st.sampled_from(["smooth", "noise"])), draw(st.integers(0, 9))
    data = encode(
        picture(width, height, kind=kind, seed=seed),
        draw(st.sampled_from([*CODINGS, *OTHERS])),
    )
    request = request_of(
        box,
        # Often without a reduction that could hide a difference.
        size=draw(
            st.just((box.height, box.width))
            | st.tuples(st.integers(1, 70), st.integers(1, 70))
        ),
        interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
        antialias=draw(st.booleans()),
        flip=draw(st.booleans()),
        entry_points=find_entry_points(data, every=draw(st.sampled_from([1, 3, 16]))),
    )
    damage, place = (
        draw(st.sampled_from(["none", "cut", "changed", "lost", "added"])),
        len(data),
    )
    if damage != "none":
        place = draw(
            st.integers(0, len(data) - 1) | st.integers(max(0, len(data) - 3), place)
        )
    some = draw(st.binary(min_size=1, max_size=8))
    rest = {"changed": place + len(some), "lost": place + len(some), "added": place}
    broken = data[:place]
    if damage in rest:
        broken += (b"" if damage == "lost" else some) + data[rest[damage] :]
    return data, broken, request, damage in ("none", "cut")


@pytest.mark.parametrize("name", list(FORMS))
@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_any_crop_of_any_bytes_is_pillows_or_an_error(
    name: str, case: tuple[bytes, bytes, CropRequest, bool]
) -> None:
    decoder, (data, broken, request, must_agree) = make(name), case
    expected = crops.crop_and_resize(crops.decode(data), request)
    assert decoder.size(data) == crops.decode(data).shape[1::-1]
    assert torch.equal(decoder.crop(data, request), expected)
    # Damage beside the box may not be seen; Pillow's pixels of damaged images are those of all.
    plain = request_of(request.box, size=request.size)
    found, expected = (outcome(each, broken, plain) for each in (decoder, Pillow()))
    assert found == expected or (expected == "unreadable" and not must_agree)
    if name == "region":
        other = outcome(FORMS["region without AVX2"](), broken, plain)
        assert found == other or "unreadable" in (found, other)


@pytest.mark.parametrize("coding", CODINGS)
def test_ordinary_jpegs_are_decoded_without_libjpeg(vectors: None, coding: str) -> None:
    """Both decoders give the same pixels, so the pixels do not show which was used."""
    pixels = np.zeros((3, 9, 9), np.uint8)
    for kind in ("smooth", "noise"):
        data = encode(picture(WIDTH, HEIGHT, kind=kind), coding)
        used_own = crops.decode_regions(
            data, [request_of(CropBox(17, 15, 31, 18), size=9)], [pixels]
        )
        assert used_own == (coding in ORDINARY | RESTARTS)
        assert bool(find_entry_points(data)) == (coding in ORDINARY)


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_a_huge_image_is_refused_before_it_is_decoded(
    decoder: Decoder, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None: as data_prep, in the same process, leaves it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    jpeg = bytearray(encode(picture(WIDTH, HEIGHT), "4:4:4"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = (65_000).to_bytes(2, "big") * 2
    webp = small_samples()["webp lossless"]
    webp = webp[:21] + b"\xff" * 4 + webp[25:]
    for data in (bytes(jpeg), webp, png(20_000, 20_000, rows=bytes(1000))):
        for read in (
            decoder.size,
            lambda d: decoder.crop(d, request_of(CropBox(0, 0, 64, 64))),
        ):
            with pytest.raises((OSError, ValueError)):
                read(data)


# The image has 83 x 61 pixels.
@rows("""
- [left, top, width, height]
- [0, 0, 84, 1]
- [0, 0, 1, 62]
- [83, 0, 1, 1]
- [-1, 0, 2, 2]
- [0, -1, 2, 2]
- [0, 0, 0, 5]
- [0, 0, 5, 0]
# More than 32 and 64 bits.
- [2147483648, 0, 8589934592, 1]
- [18446744073709551616, 0, 1, 1]
""")
def test_a_box_outside_the_image_is_refused(
    decoder: Decoder, left: int, top: int, width: int, height: int
) -> None:
    box = CropBox(left, top, width, height)
    with pytest.raises(ValueError):
        decoder.crop(encode(picture(WIDTH, HEIGHT), "4:2:0"), request_of(box))


def test_a_machine_without_the_extension_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vitscale.images.jpeg._region", None)
    monkeypatch.delattr("vitscale.images.jpeg._region", raising=False)
    crops.missing.cache_clear()
    try:
        with refused("libjpeg-dev") as error:
            resolve_decoder("region")
        assert "auto, whole" in str(error.value)
        assert resolve_decoder("auto") == "whole"
        with refused("needs AVX2 and the C extension"):
            require_entry_points(where="x")
    finally:
        crops.missing.cache_clear()


# ---- entry points --------------------------------------------------------------------------------

LARGE = CropBox(150, 80, 20, 16)


def large_jpeg(coding: str) -> bytes:
    """Noise of 6 px, so that DC values and lengths differ from block to block."""
    small = Image.fromarray(picture(34, 20, kind="noise"))
    return encode(
        np.asarray(small.resize((203, 117), Image.Resampling.BICUBIC)), coding
    )


def cut(data: bytes, points: bytes, box: CropBox = LARGE) -> tuple[bool, np.ndarray]:
    """Whether our own decoder was used, and the pixels."""
    pixels = np.zeros((3, 9, 9), np.uint8)
    request = request_of(box, size=9, antialias=True, entry_points=points)
    return crops.decode_regions(data, [request], [pixels]), pixels


@words(coding="4:4:4 4:2:0 grey")
def test_what_is_above_the_box_is_not_decoded(vectors: None, coding: str) -> None:
    """Damage there ends decoding from the top, and is not seen from the entry points."""
    data = large_jpeg(coding)
    points = find_entry_points(data, every=2)
    _, expected = cut(data, b"")
    place = data.index(b"\xff\xda") + 40
    part = data[place : place + 60]
    # No marker is made or lost.
    changed = bytes(
        byte if 0xFF in (before, byte, byte ^ 0x2A) else byte ^ 0x2A
        for before, byte in zip(data[place - 1 :], part, strict=False)
    )
    broken = data[:place] + changed + data[place + 60 :]
    try:
        assert not np.array_equal(cut(broken, b"")[1], expected)
    except ValueError:
        pass  # libjpeg sees the damage
    used, found = cut(broken, points)
    assert used and np.array_equal(found, expected)


@pytest.mark.parametrize("coding", ORDINARY)
def test_any_entry_points_are_safe(vectors: None, coding: str) -> None:
    """Entry points of another file give pixels or an error, and never a crash."""
    data, random = large_jpeg(coding), np.random.default_rng(1)
    points, num_used = find_entry_points(data, every=4), 0
    for _ in range(200):
        broken = bytearray(points)
        for place in random.integers(2, len(points), int(random.integers(1, 20))):
            broken[place] = random.integers(256)
        x, y = int(random.integers(190)), int(random.integers(100))
        used, _ = cut(data, bytes(broken), CropBox(x, y, 203 - x, 117 - y))
        num_used += used
    assert 0 < num_used < 200
    # Of another geometry, version or spacing: not used, so the pixels are right.
    other = find_entry_points(encode(picture(320, 117), coding), every=4)
    for wrong in (
        other,
        points[:-1],
        points + b"\x00",
        b"\x02" + points[1:],
        b"\x01\x00",
        b"\x01",
    ):
        assert np.array_equal(cut(data, wrong)[1], cut(data, b"")[1])
    for damaged in (b"", b"\xff\xd8\xff", data[:-200], data[:-2] + b"\x00\xff\xd9"):
        assert find_entry_points(damaged) == b""


def test_damage_of_a_file_of_entry_points_is_seen(tmp_path: Path) -> None:
    path = entry_points_file(tmp_path, "train-000000.tar")
    assert path == tmp_path / "entry_points/train-000000.jpt"
    known = {1 << 63: b"abcdef", 5: b"ghi", 7: b""}
    write_entry_points(path, known)
    assert {key: read_entry_points(path, key=key) for key in (*known, 6)} == known | {
        6: b""
    }
    data = path.read_bytes()
    for place in range(len(data)):
        changed = bytes([*data[:place], data[place] ^ 0x41, *data[place + 1 :]])
        for broken in (data[:place], changed):
            path.write_bytes(broken)
            entry_points._open.cache_clear()
            assert all(
                read_entry_points(path, key=key) in (b"", known[key]) for key in known
            )
    path.unlink()
    entry_points._open.cache_clear()
    assert read_entry_points(path, key=5) == b""
