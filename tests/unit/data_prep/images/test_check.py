from __future__ import annotations

import gzip
import io
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.images import check as checking
from data_prep.images.check import CHANGES, FAULTS, SUFFIXES, ValidationResult, validate_image
from data_prep.images.header import MAX_SCANS
from tests.support.corpora.image_samples import (
    HEIGHT,
    WIDTH,
    chunk,
    decoded,
    deep_png,
    encoded,
    pixels,
    png,
    small_samples,
    unfiltered,
)
from vitscale.runs.data_prep import ImageSettings

ROOT = Path(__file__).parents[4]
SAMPLES = small_samples()
ROWS = unfiltered(pixels(3))


def judged(data: bytes, *, convert: bool = True, **options: Any) -> ValidationResult:
    return validate_image(data, settings=ImageSettings.model_validate(options), convert=convert)


PLAIN = [
    *(name for name in SAMPLES if name.startswith("jpeg") and name[5:] not in ("cmyk", "rotated")),
    *("png", "png smooth", "png grey", "png 1 bit", "png palette", "png palette 4 bits"),
    *("png interlaced", "webp", "webp smooth", "webp lossless"),
]


@pytest.mark.parametrize("check", ["header", "decode"])
@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_stay_untouched_unless_something_forces_a_change(name: str, check: str) -> None:
    data = SAMPLES[name]
    verdict = judged(data, check=check)
    assert verdict.reason is None
    assert verdict.input_hash == blake3(data).digest()
    assert verdict.content_hash == blake3(verdict.content).digest()
    if name in PLAIN:
        assert verdict.content is data
        assert verdict.content_hash is verdict.input_hash
        assert verdict.changes is None
        suffix = SUFFIXES[name.split()[0]]
        assert (verdict.extension, verdict.width, verdict.height) == (suffix, WIDTH, HEIGHT)
    else:
        assert verdict.changes and set(verdict.changes.split(",")) <= set(CHANGES)
        assert judged(data, check=check, convert=False).content in (data, b"")


def test_without_conversion_only_what_decoders_ruin_is_rejected() -> None:
    for name, data in SAMPLES.items():
        reason = judged(data, convert=False).reason
        assert reason == ("deep_grey" if name == "png 16 bits" else None), name


def faults() -> list[tuple[str, bytes, dict[str, Any]]]:
    jpeg, png_, webp = SAMPLES["jpeg"], SAMPLES["png"], SAMPLES["webp"]
    scan = SAMPLES["jpeg progressive"]
    scan = scan[scan.index(b"\xff\xda") : -2]
    packed = gzip.compress(jpeg, mtime=0)
    half = len(ROWS) // 2
    return [
        ("empty", b"", {}),
        ("bad_gzip", packed[:-1], {}),
        ("bad_gzip", packed[:-8] + b"12345678", {}),
        ("bad_gzip", b"\x1f\x8b\x08\0", {}),
        ("bad_gzip", packed[:60] + b"\xff" * 60 + packed[120:], {}),
        ("not_an_image", b"<!DOCTYPE html><html>", {}),
        ("not_an_image", bytes(1000), {}),
        ("not_an_image", gzip.compress(b"some text", mtime=0), {}),
        ("not_an_image", gzip.compress(packed, mtime=0), {}),
        ("other_format", encoded(pixels(3), "GIF"), {}),
        ("other_format", encoded(pixels(3), "BMP"), {}),
        ("other_format", encoded(pixels(3), "TIFF"), {}),
        ("other_format", encoded(pixels(3), "JPEG2000"), {}),
        ("other_format", gzip.compress(encoded(pixels(3), "GIF"), mtime=0), {}),
        ("bad_header", b"\xff\xd8\xff\xd9", {}),
        ("bomb", SAMPLES["jpeg progressive"][:-2] + scan * MAX_SCANS + b"\xff\xd9", {}),
        ("too_many_pixels", png(60_000, 60_000, rows=bytes(1000) * 60), {}),
        ("too_many_pixels", jpeg, {"max_pixels": WIDTH * HEIGHT - 1}),
        ("too_small", jpeg, {"min_side": HEIGHT + 1}),
        ("deep_grey", SAMPLES["png 16 bits"], {"convert": False}),
        ("bad_pixels", jpeg[:-300], {}),
        ("bad_pixels", png_[:-300], {}),
        ("bad_pixels", webp[:-300], {}),
        ("bad_pixels", png(WIDTH, HEIGHT, rows=ROWS[:half]), {"check": "decode"}),
        ("bad_pixels", deep_png(pixels(3, dtype=np.uint16))[:-300], {}),
    ]


@pytest.mark.parametrize("reason, data, options", faults())
def test_unusable_content_is_rejected_with_its_reason(
    reason: str, data: bytes, options: dict[str, Any]
) -> None:
    verdict = judged(data, **{"check": "header", **options})
    assert verdict.reason == judged(data, **{"check": "decode", **options}).reason == reason
    assert verdict.content == b"" and verdict.changes is None
    assert verdict.input_hash == blake3(data).digest()


def test_every_fault_is_planted() -> None:
    assert {reason for reason, _, _ in faults()} == set(FAULTS) - {"too_large"}


def test_limits_are_inclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(SAMPLES["jpeg"], max_pixels=WIDTH * HEIGHT, min_side=HEIGHT).reason is None
    size = len(SAMPLES["png"])
    for limit, reason in ((size, None), (size - 1, "too_large")):
        monkeypatch.setattr(checking, "MAX_FILE_BYTES", limit)
        for data in (SAMPLES["png"], gzip.compress(SAMPLES["png"], 9)):
            assert len(data) > limit or judged(data).reason == reason


@pytest.mark.parametrize("check", ["header", "decode"])
@pytest.mark.parametrize("convert", [False, True])
def test_gzip_is_taken_off(convert: bool, check: str) -> None:
    for name in ("jpeg", "png", "webp"):
        verdict = judged(gzip.compress(SAMPLES[name]), convert=convert, check=check)
        assert (verdict.reason, verdict.changes) == (None, "gzip")
        assert verdict.content == SAMPLES[name]
        assert verdict.content_hash == blake3(SAMPLES[name]).digest() != verdict.input_hash
    verdict = judged(gzip.compress(SAMPLES["jpeg cmyk"]))
    assert verdict.changes == "gzip,cmyk"
    assert verdict.content == judged(SAMPLES["jpeg cmyk"]).content


@pytest.mark.parametrize("check", ["header", "decode"])
def test_png_text_that_readers_refuse_is_left_out(check: str) -> None:
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(50 << 20)))
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(50 << 20)))
    damaged = chunk(b"tEXt", b"author\0me")[:-1] + b"?"
    for extra in (bomb, profile, damaged):
        data = png(WIDTH, HEIGHT, rows=ROWS, before=extra)
        with pytest.raises(Exception):  # noqa: B017  # whatever Pillow raises
            decoded(data)
        verdict = judged(data, check=check)
        assert (verdict.reason, verdict.changes) == (None, "metadata")
        assert verdict.content == png(WIDTH, HEIGHT, rows=ROWS)
        assert judged(data, check=check, convert=False).reason == "bad_header"
    harmless = png(WIDTH, HEIGHT, rows=ROWS, before=chunk(b"tEXt", b"author\0me"))
    assert judged(harmless, check=check).content is harmless


def test_lack_of_memory_rejects_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    for name in ("jpeg", "jpeg cmyk", "png"):
        with pytest.raises(MemoryError):
            judged(SAMPLES[name])


BOMBS = """
    import gzip, io, resource, sys, zlib

    from PIL import Image

    from data_prep.images import check as limits
    from data_prep.images.check import validate_image
    from tests.support.corpora.image_samples import HEIGHT, WIDTH, chunk, encoded, pixels, png
    from tests.support.corpora.image_samples import small_samples, unfiltered
    from vitscale.runs.data_prep import ImageSettings

    def zeros(start, wbits):
        # A block after a full flush can be repeated: 4 GiB of zeros in 4 MiB.
        deflate = zlib.compressobj(9, wbits=wbits)
        first = deflate.compress(start) + deflate.flush(zlib.Z_FULL_FLUSH)
        block = deflate.compress(bytes(1 << 26)) + deflate.flush(zlib.Z_FULL_FLUSH)
        return first + 64 * block

    jpeg = small_samples()["jpeg"]
    sizes = bytes([0, HEIGHT, 0, WIDTH]), bytes([0xFF, 0xDC, 0xFF, 0xDC])
    rows = unfiltered(pixels(3))
    text = b"k\\0\\0" + zeros(b"", 15)
    mib = b"k\\0\\0" + zlib.compress(bytes(1 << 20))
    frames = [Image.fromarray(pixels(3, seed=i)) for i in range(1, 100)]
    canvas = b"VP8X" + (10).to_bytes(4, "little") + b"\\2\\0\\0\\0" + b"\\xff" * 6
    frame = b"ANMF" + (14).to_bytes(4, "little") + bytes(14)
    webp = b"RIFF" + (4 + len(canvas + frame)).to_bytes(4, "little") + b"WEBP" + canvas + frame
    bombs = {
        "png that claims pixels": (png(60_000, 60_000, packed=b"1234"), "too_many_pixels"),
        "png with more pixels": (png(WIDTH, HEIGHT, packed=zeros(rows, 15)), None),
        "png with text": (png(WIDTH, HEIGHT, rows=rows, before=chunk(b"zTXt", text)), None),
        "png with profile": (png(WIDTH, HEIGHT, rows=rows, before=chunk(b"iCCP", text)), None),
        "png with texts": (png(WIDTH, HEIGHT, rows=rows, after=chunk(b"zTXt", mib) * 500), None),
        "png with frames": (encoded(pixels(3), "PNG", save_all=True, append_images=frames), None),
        "jpeg that claims pixels": (jpeg.replace(*sizes), "too_many_pixels"),
        "webp that claims pixels": (webp, "too_many_pixels"),
        "image in gzip": (zeros(jpeg, 31), "too_large"),
        "zeros in gzip": (zeros(b"", 31), "not_an_image"),
    }
    def peak_kib():
        # Not ru_maxrss: it starts at the parent's.
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

    limits.MAX_FILE_BYTES = 100 << 20
    used = peak_kib()
    resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
    for check in ("header", "decode"):
        settings = ImageSettings(check=check)
        for name, (data, reason) in bombs.items():
            got = validate_image(data, settings=settings).reason
            assert got == reason, (name, check, got)
    more = peak_kib() - used
    assert more < 300 << 10, more  # twice the largest file, and what decoding small images takes
"""


def test_bombs_are_disarmed_in_bounded_memory() -> None:
    """In 1.5 GiB of address space; each bomb unpacks to more."""
    program = textwrap.dedent(BOMBS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_fault_and_change_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "images.md").read_text("utf-8")
    for name in (*FAULTS, *CHANGES):
        assert f"`{name}`" in text, name


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_fault_check_equals_decoding_every_pixel(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["jpeg", "jpeg grey", "jpeg progressive"]))
    jpeg = bytearray(SAMPLES[name])
    start = jpeg.find(b"\xff\xda") + 14
    at = data.draw(st.integers(start, len(jpeg) - 2))
    damage = data.draw(st.binary(min_size=1, max_size=40) | st.just(b"\xff\xd9"))
    jpeg[at : at + data.draw(st.sampled_from([0, len(damage), 40]))] = damage
    if judged(bytes(jpeg), check="header").reason is not None:
        return
    try:
        Image.open(io.BytesIO(jpeg)).load()
        expected = None
    except Exception:
        expected = "bad_pixels"
    assert judged(bytes(jpeg), check="decode").reason == expected


def test_strict_check_passes_valid_images_and_rejects_noise() -> None:
    for name, data in SAMPLES.items():
        assert judged(data, check="strict").reason is None, name
        same = [judged(data, check=c, convert=False) for c in ("decode", "strict")]
        assert same[0] == same[1], name
    chance = np.random.default_rng(0)
    photo = encoded(chance.integers(0, 256, (200, 200, 3), np.uint8), "JPEG", quality=80)
    start = photo.find(b"\xff\xda") + 14
    found = {"decode": 0, "strict": 0}
    for _ in range(20):
        at = int(chance.integers(start, len(photo) - 600))
        # Without markers, which every decoder notices.
        noise = bytes(chance.integers(0, 255, 512, np.uint8))
        damaged = photo[:at] + noise + photo[at + 512 :]
        for check in found:
            found[check] += judged(damaged, check=check).reason == "bad_pixels"
    assert found["strict"] == 20 > found["decode"]
