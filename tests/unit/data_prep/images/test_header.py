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
    HeaderError,
    exif_orientation,
    read_header,
)
from tests.support.corpora.image_samples import (
    HEIGHT,
    WIDTH,
    chunk,
    decoded,
    encoded,
    pixels,
    png,
    rotated,
    small_samples,
    smooth,
    unfiltered,
)
from vitscale.runs.data_prep import ImageSettings

SAMPLES = small_samples()
HEADER = ImageSettings(check="header")
DECODE = ImageSettings(check="decode")


@pytest.mark.parametrize("name", SAMPLES)
def test_headers_are_read_as_pillow_reads_them(name: str) -> None:
    data = SAMPLES[name]
    header = read_header(data)
    image = Image.open(io.BytesIO(data))
    assert header.format == (image.format or "").lower().replace("mpo", "jpeg")
    assert (header.width, header.height) == image.size == (WIDTH, HEIGHT)
    assert header.orientation == image.getexif().get(0x0112, 1)
    assert ("cmyk" in header.changes) == (image.mode == "CMYK")
    assert ("transparency" in header.changes) == image.has_transparency_data
    animated = getattr(image, "is_animated", False) and image.format != "MPO"
    assert ("animation" in header.changes) == animated
    assert ("16_bit" in header.changes) == ("16 bits" in name)
    assert ("exif_rotation" in header.changes) == ("rotated" in name)
    assert header.lossy == (name.startswith(("jpeg", "webp")) and "lossless" not in name)
    assert header.certain or name == "png animated"


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


def test_webp_frame_unlike_its_canvas_is_rejected() -> None:
    data = SAMPLES["webp rotated"]
    wide = data[:24] + bytes([WIDTH]) + data[25:]
    assert validate_image(wide, settings=HEADER).reason == "bad_header"


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


@pytest.mark.parametrize("byte_order", ["little", "big"])
def test_orientation_is_read_in_both_byte_orders(
    byte_order: str,
) -> None:
    mark, start = ("<", b"II*\0") if byte_order == "little" else (">", b"MM\0*")
    entries = struct.pack(mark + "HHIHH", 0x0100, 3, 1, 9, 0)
    entries += struct.pack(mark + "HHIHH", 0x0112, 3, 1, 7, 0)
    tiff = start + struct.pack(mark + "IH", 8, 2) + entries
    assert exif_orientation(tiff) == 7
    for end in range(len(tiff) - 2):
        assert exif_orientation(tiff[:end]) == 1
    ninth = tiff[:-4] + struct.pack(mark + "HH", 9, 0)
    assert exif_orientation(ninth) == 1


def test_unusual_kinds_are_decoded_to_be_believed() -> None:
    data = SAMPLES["jpeg"]
    frame = data.index(b"\xff\xc0")
    twelve_bits = data[: frame + 4] + b"\x0c" + data[frame + 5 :]
    lossless = data[: frame + 1] + b"\xc3" + data[frame + 2 :]
    two_channels = data[: frame + 9] + b"\x02" + data[frame + 10 :]
    without_codes = data[: data.index(b"\xff\xc4")] + data[data.index(b"\xff\xda") :]
    for odd in (twelve_bits, lossless, two_channels, without_codes):
        assert not read_header(odd).certain
        for mode in (HEADER, DECODE):
            verdict = validate_image(odd, settings=mode)
            try:
                decoded(odd)
            except Exception:
                assert verdict.reason in ("bad_header", "bad_pixels")
            else:
                assert verdict.reason is None


@pytest.mark.parametrize("stray", [b"z", b"z" * 16, b"\xff\x00", b"\xff\x00z\xff", b"\0" * 9000])
def test_stray_bytes_between_segments_are_decoded(stray: bytes) -> None:
    data = SAMPLES["jpeg"]
    places = [data.index(marker) for marker in (b"\xff\xdb", b"\xff\xc0", b"\xff\xc4", b"\xff\xda")]
    for place in places:
        odd = data[:place] + stray + data[place:]
        assert np.array_equal(decoded(odd), decoded(data))
        assert not read_header(odd).certain
        for mode in (HEADER, DECODE):
            assert validate_image(odd, settings=mode).reason is None
        assert validate_image(odd, settings=ImageSettings(check="strict")).reason == "bad_pixels"


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


def test_files_made_to_keep_a_reader_busy_are_rejected_at_once() -> None:
    jpeg = SAMPLES["jpeg progressive"]
    end = jpeg.index(b"\xff\xda")
    scan = jpeg[end:-2]
    for bomb in (
        b"\xff\xd8" + b"\xff" * 10_000_000,
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000 + jpeg[2:],
        jpeg[:-2] + scan * MAX_SCANS + b"\xff\xd9",
    ):
        with pytest.raises(HeaderError, match="bomb"):
            read_header(bomb)
    many_chunks = png(2, 2, rows=bytes(14), after=chunk(b"teXt", b"") * 1_000_001)
    with pytest.raises(HeaderError, match="bomb"):
        read_header(many_chunks)


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


def test_scans_of_single_components_are_counted() -> None:
    jpeg = SAMPLES["jpeg"]
    scan = jpeg.index(b"\xff\xda")
    one = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + jpeg[scan + 14 : -2]
    with pytest.raises(HeaderError, match="bomb"):
        read_header(jpeg[:scan] + one * (MAX_SCANS + 1) + b"\xff\xd9")
    # All components in one scan: a decoder stops after it.
    read_header(jpeg[:-2] + jpeg[scan:-2] * MAX_SCANS + b"\xff\xd9")


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


def test_exif_of_all_formats_is_found() -> None:
    for format in ("JPEG", "PNG", "WEBP"):
        for orientation in range(1, 9):
            data = encoded(smooth(), format, exif=rotated(orientation))
            assert read_header(data).orientation == orientation
