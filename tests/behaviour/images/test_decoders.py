"""All decoders give Pillow's pixels, or its error, for any crop of any bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
from tests.support.tables import Values, every, refused, rows, words
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

# No multiples of 8 or 16: blocks at the right and the bottom are cut.
WIDTH = 83
HEIGHT = 61


class WithoutAVX2(crops.RegionDecoder):
    allow_avx2 = False


# The extension has vectors for one kind of processor, and a plain form for the others.
FORMS: dict[str, Callable[[], Decoder]] = {
    **DECODERS,
    "region without AVX2": WithoutAVX2,
}


class Pillow(Decoder):
    """The reference: always the whole picture."""

    def whole(self, data):
        return crops.decode(data)


def make(name):
    """Make a decoder; skip the test where this machine lacks what it needs."""
    if why := crops.missing(name.split()[0]):
        skip_or_fail(f"{name} does not work here: {why}")
    return FORMS[name]()


@pytest.fixture(params=list(FORMS))
def decoder(request):
    return make(request.param)


@pytest.fixture
def vectors():
    """Our own decoder of ordinary JPEGs, and entry points, need AVX2 and BMI2."""
    make("region")
    require_entry_points(where="this machine")


def request_of(box, *, size=8, **more):
    options = {"interpolation": "bilinear", "antialias": False, "flip": False}
    return CropRequest(box=box, size=size, **options | more)


def outcome(decoder, data, request):
    try:
        return decoder.crop(data, request).tolist()
    except (OSError, ValueError):
        return "unreadable"


def picture(width, height, *, kind="smooth", seed=0):
    """Colour waves, as smooth as a photograph, or noise."""
    random = np.random.default_rng(seed)

    # Nothing is predictable, so every coefficient of a block is used.
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)

    # Three sine waves in different directions, one a channel.
    y, x = np.mgrid[:height, :width] / 20
    waves = []
    for across, down, phase in random.uniform(-2, 2, (3, 3)):
        waves.append(np.sin(x * across + y * down + phase))
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


def encode(pixels, coding):
    image = Image.fromarray(pixels)
    if coding in OTHERS:
        form, _, mode = coding.partition(" ")
        return encoded(image.convert(mode or "RGB"), form, lossless=True)
    if coding in ("4:1:1", "4:4:0"):  # Pillow cannot write these
        subsampling = coding.replace(":", "")
        contiguous = np.ascontiguousarray(pixels)
        return simplejpeg.encode_jpeg(contiguous, colorsubsampling=subsampling)
    if coding == "grey":
        image = image.convert("L")
    return encoded(image, "JPEG", **CODINGS[coding])


@st.composite
def cases(draw):
    """An image, the same after damage, what is wanted of it, and whether it was only cut."""
    width = draw(st.integers(1, 140))
    height = draw(st.integers(1, 70))
    left = draw(st.integers(0, width - 1))
    top = draw(st.integers(0, height - 1))
    box = CropBox(
        left,
        top,
        draw(st.integers(1, width - left)),
        draw(st.integers(1, height - top)),
    )
    kind = draw(st.sampled_from(["smooth", "noise"]))
    pixels = picture(width, height, kind=kind, seed=draw(st.integers(0, 9)))
    data = encode(pixels, draw(st.sampled_from([*CODINGS, *OTHERS])))

    # Often without a reduction that could hide a difference.
    same_size = st.just((box.height, box.width))
    any_size = st.tuples(st.integers(1, 70), st.integers(1, 70))
    every = draw(st.sampled_from([1, 3, 16]))
    request = request_of(
        box,
        size=draw(same_size | any_size),
        interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
        antialias=draw(st.booleans()),
        flip=draw(st.booleans()),
        entry_points=find_entry_points(data, every=every),
    )

    damage = draw(st.sampled_from(["none", "cut", "changed", "lost", "added"]))
    if damage == "none":
        return data, data, request, True

    # Anywhere, or in the end marker.
    end = len(data)
    anywhere = st.integers(0, end - 1)
    place = draw(anywhere | st.integers(max(0, end - 3), end))
    if damage == "cut":
        return data, data[:place], request, True
    some = draw(st.binary(min_size=1, max_size=8))
    rest = data[place:] if damage == "added" else data[place + len(some) :]
    if damage == "lost":
        some = b""
    return data, data[:place] + some + rest, request, False


@every(name=FORMS)
@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_any_crop_of_any_bytes_is_pillows_or_an_error(name, case):
    """Also in the row of a batch that is given."""
    decoder = make(name)
    data, broken, request, must_agree = case
    whole = crops.decode(data)
    expected = crops.crop_and_resize(whole, request)
    assert decoder.size(data) == whole.shape[1::-1]
    assert torch.equal(decoder.crop(data, request), expected)

    # Written in place, and not a pixel beside it.
    batch = torch.full((3, 3, *request.shape), 7, dtype=torch.uint8)
    row = batch[1]
    decoder.crops(data, [request], [row])
    assert torch.equal(row, expected)
    assert (batch[[0, 2]] == 7).all()

    # Damage beside the box may not be seen; Pillow's pixels of damaged images are those of all.
    plain = request_of(request.box, size=request.size)
    found = outcome(decoder, broken, plain)
    pillows = outcome(Pillow(), broken, plain)
    may_differ = pillows == "unreadable" and not must_agree
    assert found == pillows or may_differ
    if name == "region":
        other = outcome(FORMS["region without AVX2"](), broken, plain)
        assert found == other or "unreadable" in (found, other)


@every(coding=CODINGS)
def test_ordinary_jpegs_are_decoded_without_libjpeg(vectors, coding):
    """Both decoders give the same pixels, so the pixels do not show which was used."""
    pixels = np.zeros((3, 9, 9), np.uint8)
    request = request_of(CropBox(17, 15, 31, 18), size=9)
    for kind in ("smooth", "noise"):
        data = encode(picture(WIDTH, HEIGHT, kind=kind), coding)
        used_own = crops.decode_regions(data, [request], [pixels])
        assert used_own == (coding in ORDINARY | RESTARTS)

        # Restart markers are entry points already, so none are looked for.
        assert bool(find_entry_points(data)) == (coding in ORDINARY)


@every(limit=[Image.MAX_IMAGE_PIXELS, None])
def test_a_huge_image_is_refused_before_it_is_decoded(decoder, limit, monkeypatch):
    # None: as data_prep, in the same process, leaves it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    jpeg = bytearray(encode(picture(WIDTH, HEIGHT), "4:4:4"))

    # The sides stand in the header: behind the marker, the length and the depth of a JPEG's frame.
    sides = jpeg.index(b"\xff\xc0") + 5
    jpeg[sides : sides + 4] = (65_000).to_bytes(2, "big") * 2
    webp = small_samples()["webp lossless"]
    webp = webp[:21] + b"\xff" * 4 + webp[25:]

    request = request_of(CropBox(0, 0, 64, 64))
    for data in (bytes(jpeg), webp, png(20_000, 20_000, rows=bytes(1000))):
        with pytest.raises((OSError, ValueError)):
            decoder.size(data)
        with pytest.raises((OSError, ValueError)):
            decoder.crop(data, request)


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
def test_a_box_outside_the_image_is_refused(decoder, left, top, width, height):
    data = encode(picture(WIDTH, HEIGHT), "4:2:0")
    request = request_of(CropBox(left, top, width, height))
    with pytest.raises(ValueError):
        decoder.crop(data, request)


def test_a_machine_without_the_extension_says_how_to_get_it(monkeypatch):
    # None in sys.modules makes the import fail, as where the extension was not built.
    monkeypatch.setitem(sys.modules, "vitscale.images.jpeg._region", None)
    monkeypatch.delattr("vitscale.images.jpeg._region", raising=False)
    crops.missing.cache_clear()

    # What is missing is remembered, before and after.
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

# Near the lower right corner, so that most of the image lies above it.
LARGE = CropBox(150, 80, 20, 16)


def large_jpeg(coding):
    """Noise of 6 px, so that DC values and lengths differ from block to block."""
    small = Image.fromarray(picture(34, 20, kind="noise"))
    large = small.resize((203, 117), Image.Resampling.BICUBIC)
    return encode(np.asarray(large), coding)


def cut(data, points, box=LARGE):
    """Whether our own decoder was used, and the pixels."""
    pixels = np.zeros((3, 9, 9), np.uint8)
    request = request_of(box, size=9, antialias=True, entry_points=points)
    return crops.decode_regions(data, [request], [pixels]), pixels


@words(coding="4:4:4 4:2:0 grey")
def test_what_is_above_the_box_is_not_decoded(vectors, coding):
    """Damage there ends decoding from the top, and is not seen from the entry points."""
    data = large_jpeg(coding)
    points = find_entry_points(data, every=2)
    _, expected = cut(data, b"")

    # In the coded data, soon behind the header of the scan.
    place = data.index(b"\xff\xda") + 40
    end = place + 60
    part = data[place:end]

    # No marker is made or lost.
    changed = bytearray()
    for before, byte in zip(data[place - 1 :], part, strict=False):
        flipped = byte ^ 0x2A
        changed.append(byte if 0xFF in (before, byte, flipped) else flipped)
    broken = data[:place] + changed + data[end:]
    try:
        _, pixels = cut(broken, b"")
        assert not np.array_equal(pixels, expected)
    except ValueError:
        pass  # libjpeg sees the damage

    used_own, pixels = cut(broken, points)
    assert used_own
    assert np.array_equal(pixels, expected)


@every(coding=ORDINARY)
def test_any_entry_points_are_safe(vectors, coding):
    """Entry points of another file give pixels or an error, and never a crash."""
    data = large_jpeg(coding)
    random = np.random.default_rng(1)
    points = find_entry_points(data, every=4)
    num_used = 0
    for _ in range(200):
        broken = bytearray(points)

        # Behind version and spacing, which would make all of them unusable.
        num_changed = int(random.integers(1, 20))
        for place in random.integers(2, len(points), num_changed):
            broken[place] = random.integers(256)
        x = int(random.integers(190))
        y = int(random.integers(100))
        box = CropBox(x, y, 203 - x, 117 - y)
        used_own, _ = cut(data, bytes(broken), box)
        num_used += used_own
    assert 0 < num_used < 200

    # Of another geometry, version or spacing: not used, so the pixels are right.
    _, expected = cut(data, b"")
    other = find_entry_points(encode(picture(320, 117), coding), every=4)
    for wrong in (
        other,
        points[:-1],
        points + b"\x00",
        b"\x02" + points[1:],
        b"\x01\x00",
        b"\x01",
    ):
        _, pixels = cut(data, wrong)
        assert np.array_equal(pixels, expected)

    # A damaged image has none: they would be kept beside the shards.
    for damaged in (b"", b"\xff\xd8\xff", data[:-200], data[:-2] + b"\x00\xff\xd9"):
        assert find_entry_points(damaged) == b""


def test_damage_of_a_file_of_entry_points_is_seen(tmp_path):
    path = entry_points_file(tmp_path, "train-000000.tar")
    assert path == tmp_path / "entry_points/train-000000.jpt"
    # A key that needs all 64 bits, and an image without entry points, which is left out.
    known = {1 << 63: b"abcdef", 5: b"ghi", 7: b""}
    write_entry_points(path, known)
    for key, points in (known | {6: b""}).items():
        assert read_entry_points(path, key=key) == points

    # Cut at every byte, and with every byte changed: nothing, or what was written.
    data = path.read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x41
        for broken in (data[:place], bytes(changed)):
            path.write_bytes(broken)
            entry_points._open.cache_clear()
            for key, points in known.items():
                assert read_entry_points(path, key=key) in (b"", points)

    # Shards may come without them.
    path.unlink()
    entry_points._open.cache_clear()
    assert read_entry_points(path, key=5) == b""
