from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.images.check import FAULTS, validate_image
from data_prep.images.header import (
    MAX_SCANS,
    ORDINARY_SCANS,
)
from tests.support.corpora.image_samples import (
    HEIGHT,
    WIDTH,
    decoded,
    encoded,
    pixels,
    png,
    small_samples,
    unfiltered,
)
from vitscale.runs.data_prep import ImageSettings

SAMPLES = small_samples()
HEADER = ImageSettings(check="header")
DECODE = ImageSettings(check="decode")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("mode", [HEADER, DECODE], ids=lambda mode: mode.check)
def test_truncation_is_found_at_every_offset(name: str, mode: ImageSettings) -> None:
    data = SAMPLES[name]
    whole = decoded(data, "RGB")
    for end in range(len(data)):
        verdict = validate_image(data[:end], settings=mode)
        if verdict.reason is None:
            # Only data after the picture may be missing: a phone's second picture.
            assert name == "jpeg two pictures", end
            assert np.array_equal(decoded(data[:end], "RGB"), whole)


@pytest.mark.parametrize("mode", [HEADER, DECODE], ids=lambda mode: mode.check)
@pytest.mark.parametrize("tail", [b"\0" * 5000, b"garbage" * 99, b"\xff\xd8\xff\xe0"])
def test_bytes_behind_the_end_do_no_harm(tail: bytes, mode: ImageSettings) -> None:
    for name in ("jpeg", "jpeg progressive", "png", "webp"):
        assert validate_image(SAMPLES[name] + tail, settings=mode).reason is None, name


@pytest.mark.parametrize("mode", [HEADER, DECODE], ids=lambda mode: mode.check)
def test_a_tail_of_zeros_in_place_of_pixels_is_found(mode: ImageSettings) -> None:
    for name, data in SAMPLES.items():
        # WebP decodes pixels from any bytes.
        if name != "jpeg two pictures" and not name.startswith("webp"):
            cut = len(data) * 2 // 3
            damaged = data[:cut] + bytes(len(data) - cut)
            assert validate_image(damaged, settings=mode).reason is not None, name


def test_every_damaged_byte_of_png_pixels_is_found_by_decoding() -> None:
    data = SAMPLES["png"]
    start = data.index(b"IDAT") + 4
    for place in range(start, len(data) - 16, 7):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert validate_image(damaged, settings=DECODE).reason == "bad_pixels"


def test_a_wrong_checksum_of_png_pixels_is_found() -> None:
    data = SAMPLES["png"]
    end = data.index(b"IEND") - 4
    damaged = data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:]
    assert validate_image(damaged, settings=DECODE).reason == "bad_pixels"


def test_missing_pixels_before_the_end_marker_are_found() -> None:
    rows = unfiltered(pixels(3))
    short = png(WIDTH, HEIGHT, rows=rows[: len(rows) // 2])
    assert validate_image(short, settings=DECODE).reason == "bad_pixels"
    jpeg = SAMPLES["jpeg"]
    start = jpeg.index(b"\xff\xda")
    nothing = jpeg[: start + 14] + b"\xff\xd9"
    large = nothing.replace(struct.pack(">HH", HEIGHT, WIDTH), struct.pack(">HH", 4000, 4000))
    for mode in (HEADER, DECODE):
        assert validate_image(large, settings=mode).reason == "bad_pixels"
    # Deflate cannot have held so many pixels.
    claimed = png(4000, 4000, rows=rows)
    assert validate_image(claimed, settings=HEADER).reason == "bad_pixels"


def broken_headers() -> dict[str, bytes]:
    jpeg, png_, webp = SAMPLES["jpeg"], SAMPLES["png"], SAMPLES["webp"]
    frame = jpeg.index(b"\xff\xc0")
    return {
        "no segments": b"\xff\xd8\xff",
        "end at once": b"\xff\xd8\xff\xd9" + jpeg[2:],
        "no marker": jpeg[:2] + b"\xff\xe0\x00\x04zz" + b"zz" * 9000,
        "two frames": jpeg[:frame] + jpeg[frame : frame + 19] + jpeg[frame:],
        "no frame": jpeg[:frame] + jpeg[frame + 19 :],
        "no lines": jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :],
        "segment too short": jpeg[:4] + b"\0\1" + jpeg[6:],
        "header's checksum": png_[:17] + b"\1" + png_[18:],
        "no width": png(0, 5, rows=b"\0"),
        "depth": png(4, 4, depth=3, rows=bytes(20)),
        "colour type": png(4, 4, colour=5, rows=bytes(20)),
        "frame in webp": webp[:12] + b"ABCD" + webp[16:],
    }


@pytest.mark.parametrize("name", broken_headers())
def test_broken_headers_are_rejected_in_both_modes(name: str) -> None:
    for mode in (HEADER, DECODE):
        assert validate_image(broken_headers()[name], settings=mode).reason == "bad_header"


def scanned(size: tuple[int, int], *, scans: int) -> bytes:
    """A flat progressive JPEG whose last scan, of one bit per 32,767 blocks, is repeated."""
    data = encoded(Image.new("L", size, 90), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xc4") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + b"\xff\xd9"


@pytest.mark.parametrize("check", ["header", "decode", "strict"])
def test_scans_are_limited_by_scans_times_pixels(check: str) -> None:
    settings = ImageSettings.model_validate({"check": check})
    for size, scans, is_bomb in [
        ((64, 64), MAX_SCANS, False),
        ((64, 64), MAX_SCANS + 1, True),
        ((3000, 2000), ORDINARY_SCANS, False),
        ((3000, 2000), 97, True),
    ]:
        reason = validate_image(scanned(size, scans=scans), settings=settings).reason
        # Repeated scans make decoders warn, which the strict check takes for damage.
        sound = "bad_pixels" if check == "strict" else None
        assert reason == ("bomb" if is_bomb else sound), (size, scans)


def check_any(data: bytes) -> None:
    for mode in (HEADER, DECODE, ImageSettings(short_side=8, max_pixels=10_000)):
        verdict = validate_image(data, settings=mode)
        assert verdict.reason is None or verdict.reason in FAULTS
        # A header alone guarantees nothing about the data after it.
        if verdict.reason is None and mode is not HEADER:
            image = Image.open(io.BytesIO(verdict.content))
            assert image.size == (verdict.width, verdict.height)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400), start=st.sampled_from(["", "jpeg", "png", "webp", "gzip"]))
def test_no_bytes_raise(data: bytes, start: str) -> None:
    starts = {"": b"", "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\0"}
    check_any((starts[start] if start in starts else SAMPLES[start][:40]) + data)


def test_no_damaged_image_raises() -> None:
    rng = random.Random(0)
    for data in SAMPLES.values():
        for _ in range(25):
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 1, 3, 20])):
                # Mostly in the headers, where every byte means something.
                end = rng.choice([40, 200, len(data)])
                damaged[rng.randrange(min(end, len(data)))] = rng.randrange(256)
            check_any(bytes(damaged))
