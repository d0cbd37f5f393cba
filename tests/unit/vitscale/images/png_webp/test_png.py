"""PNG: Pillow's pixels of every ordinary image, and Pillow's decision about every other one."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.corpora.image_samples import chunk, encoded, pixels, png, rotated, small_samples
from vitscale.images import crops
from vitscale.images.crops import CropBox, CropRequest
from vitscale.images.decoders import PillowDecoder, RegionDecoder, decode_png_box, show_decoder
from vitscale.images.png_webp import png as fast

pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")
COLOURS = {"grey": 0, "RGB": 2, "palette": 3, "grey with alpha": 4, "RGB with alpha": 6}
SIZES = ((1, 1), (1, 9), (9, 1), (2, 3), (23, 19), (64, 33))
COLOUR_TABLE = chunk(b"PLTE", random.Random(5).randbytes(3 * 256))
SHORT_TABLE = chunk(b"PLTE", random.Random(5).randbytes(3 * 6))
ICC = b"sRGB\0\0" + zlib.compress(bytes(range(256)) * 12)
BOMB = b"sRGB\0\0" + zlib.compress(bytes(4 << 20))


@pytest.fixture(autouse=True)
def _built() -> None:
    why = fast.missing()
    if why is not None:
        required = os.environ.get("VITSCALE_REQUIRE_REGION_DECODER")
        (pytest.skip if "was not built" in why and not required else pytest.fail)(why)


def made(
    width: int,
    height: int,
    *,
    colour: int,
    filters: str = "01234",
    before: bytes = b"",
    seed: int = 0,
) -> bytes:
    """Random filtered rows, which are a valid image. Without `before` a palette has all colours."""
    rng = random.Random(seed)
    samples = fast.SAMPLES[colour]
    rows = [
        bytes([int(filters[y % len(filters)])]) + rng.randbytes(width * samples)
        for y in range(height)
    ]
    if colour == fast.PALETTE and not before:
        before = COLOUR_TABLE
    return png(width, height, colour=colour, rows=b"".join(rows), before=before)


def decoded(data: bytes) -> torch.Tensor | None:
    """None if the image is left to Pillow."""
    return fast.whole(data, max_pixels=crops.MAX_PIXELS)


def outcome(read: object, data: bytes) -> torch.Tensor | None:
    try:
        return read(data)
    except (OSError, ValueError):
        return None


def agrees(data: bytes) -> bool:
    """Whether Pillow reads it; the fast decoder must do as Pillow does."""
    expected, found = outcome(crops.decode, data), outcome(RegionDecoder().whole, data)
    assert (found is None) == (expected is None)
    if expected is None or found is None:
        return False
    assert found.equal(expected)
    assert RegionDecoder().size(data) == (expected.shape[1], expected.shape[0])
    return True


@pytest.mark.parametrize("filters", ["0", "1", "2", "3", "4", "01234", "42031", "34"])
@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
def test_pixels_equal_those_of_pillow(colour: int, filters: str) -> None:
    for width, height in SIZES:
        data = made(width, height, colour=colour, filters=filters)
        found = decoded(data)
        assert found is not None and found.equal(crops.decode(data))


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
@pytest.mark.parametrize("allow_avx2", [True, False])
def test_boxes_equal_those_of_pillow(colour: int, allow_avx2: bool) -> None:
    rng = random.Random(colour)
    for turn in range(40):
        width, height = rng.randint(1, 70), rng.randint(1, 70)
        data = made(width, height, colour=colour, filters=rng.choice(["01234", "4", "2341"]))
        left, top = rng.randrange(width), rng.randrange(height)
        box = CropBox(left, top, rng.randint(1, width - left), rng.randint(1, height - top))
        request = CropRequest(
            box=box,
            size=rng.choice([rng.randint(1, 60), (rng.randint(1, 60), rng.randint(1, 60))]),
            interpolation=rng.choice(["bilinear", "bicubic"]),
            antialias=bool(turn % 2),
            flip=bool(turn % 3),
        )
        expected = PillowDecoder().crop(data, request)
        out = np.empty(expected.shape, np.uint8)
        assert decode_png_box(data, request, out, allow_avx2=allow_avx2)
        assert np.array_equal(out, expected.numpy())
        assert torch.equal(RegionDecoder(allow_avx2=allow_avx2).crop(data, request), expected)


def test_a_box_outside_the_image_is_left_to_pillow() -> None:
    data, out = made(9, 8, colour=2), np.empty((3, 4, 4), np.uint8)
    for corners in [(0, 0, 10, 1), (0, 0, 1, 9), (9, 0, 1, 1), (-1, 0, 2, 2), (0, 0, 0, 5),
                    (2**31, 0, 2**33, 1), (2**64, 0, 1, 1), (3, 0, 2**63 - 1, 1)]:  # fmt: skip
        request = CropRequest(box=CropBox(*corners), size=4, interpolation="bilinear",
                              antialias=False, flip=False)  # fmt: skip
        assert not decode_png_box(data, request, out)
        with pytest.raises(ValueError):
            RegionDecoder().crop(data, request)


# Chunks before the pixels, and whether the image is decoded without Pillow.
OTHERS = {
    "gamma and resolution": (chunk(b"gAMA", bytes(4)) + chunk(b"pHYs", bytes(9)), True),
    "short gamma": (chunk(b"gAMA", bytes(3)), False),
    "orientation": (chunk(b"eXIf", rotated(6).tobytes()[6:]), True),
    "text": (chunk(b"tEXt", b"Title\0any \xff"), True),
    "international text": (chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x/>"), True),
    "packed text": (chunk(b"zTXt", b"Title\0\0" + zlib.compress(b"text")), True),
    "text without an end of its name": (chunk(b"tEXt", b"Title"), False),
    "text named as an entry of Pillow": (chunk(b"tEXt", b"transparency\0x"), False),
    "text that says interlaced": (chunk(b"tEXt", b"interlace\0x"), False),
    "text that says a box": (chunk(b"iTXt", b"bbox\0\0\0\0\0x"), False),
    "profile": (chunk(b"iCCP", ICC), True),
    "cut profile": (chunk(b"iCCP", ICC[:40]), True),
    "damaged profile": (chunk(b"iCCP", b"sRGB\0\0wrong"), True),
    "long damaged profile": (chunk(b"iCCP", b"sRGB\0\0" + bytes(2000)), False),
    "long profile": (
        chunk(b"iCCP", b"sRGB\0\0" + zlib.compress(random.Random(1).randbytes(5000))),
        True,
    ),
    "profile that is a bomb": (chunk(b"iCCP", BOMB), False),
    "text that is a bomb": (chunk(b"zTXt", BOMB), False),
    "unknown": (chunk(b"abCd", b"?"), False),
    "unknown and critical": (chunk(b"AbCd", b"?"), False),
    "animation": (chunk(b"acTL", struct.pack(">II", 1, 0)), False),
    "second header": (chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 5, 8, 2, 0, 0, 0)), False),
    "unused palette": (COLOUR_TABLE, True),
    "two palettes": (COLOUR_TABLE + SHORT_TABLE, False),
    "transparent colour": (chunk(b"tRNS", bytes([0, 9, 0, 200, 0, 0])), True),
    "16-bit transparent colour": (chunk(b"tRNS", bytes([3, 9, 0, 200, 0, 0])), False),
    "short transparent colour": (chunk(b"tRNS", bytes(2)), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_chunks_are_harmless_or_left_to_pillow(name: str) -> None:
    before, is_taken = OTHERS[name]
    data = made(12, 7, colour=2, before=before)
    assert (decoded(data) is not None) == is_taken
    assert agrees(data) or not is_taken


@pytest.mark.parametrize(
    "table, is_taken",
    [
        (COLOUR_TABLE + chunk(b"tRNS", bytes([255, 0, 255])), True),
        (COLOUR_TABLE + chunk(b"tRNS", bytes(range(256))), True),
        (chunk(b"tRNS", bytes(4)) + COLOUR_TABLE, True),
        (SHORT_TABLE, False),  # some pixels have colours beyond it
        (SHORT_TABLE + chunk(b"tRNS", bytes(7)), False),
        (chunk(b"PLTE", bytes(3 * 257)), False),
        (chunk(b"PLTE", bytes(767)), False),
        (chunk(b"PLTE", b""), False),
        (chunk(b"tEXt", b"Title\0no palette"), False),
        (chunk(b"tRNS", bytes([255, 0, 255])), False),  # an AssertionError inside Pillow
    ],
)
def test_palettes_equal_those_of_pillow(table: bytes, is_taken: bool) -> None:
    data = made(40, 30, colour=fast.PALETTE, before=table)
    assert (decoded(data) is not None) == is_taken
    agrees(data)


def test_all_other_kinds_are_left_to_pillow() -> None:
    """Other depths, interlaced and animated images; all samples give Pillow's pixels."""
    left = {name for name, data in small_samples().items()
            if name.startswith("png") and agrees(data) and decoded(data) is None}  # fmt: skip
    assert left == {
        *("png 1 bit", "png palette", "png palette 4 bits", "png palette transparent"),
        *("png 16 bits", "png 16 bits rgb", "png interlaced", "png animated"),
    }


def test_the_python_library_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no wheel of ISA-L."""
    monkeypatch.setattr(fast, "_zlib", lambda: zlib)
    data = made(50, 40, colour=2)
    found = decoded(data)
    assert found is not None and found.equal(crops.decode(data))
    assert not agrees(data[:-500])


def test_pillow_decodes_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_extension", lambda: None)
    data = made(50, 40, colour=2)
    assert decoded(data) is None and agrees(data)


def test_the_start_says_that_pillow_decodes_png(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PNG" not in show_decoder("auto")
    monkeypatch.setattr(fast, "missing", lambda: "not built")
    assert show_decoder("simplejpeg") == "simplejpeg (PNG with Pillow: not built)"
    assert show_decoder("pillow") == "pillow"


def packed_again(data: bytes, change: object) -> bytes:
    """The same image with other inflated bytes; all checksums are right."""
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    rows = bytearray(zlib.decompress(data[start + 8 : end - 4]))
    return data[:start] + chunk(b"IDAT", zlib.compress(change(rows))) + data[end:]


def test_wrong_pixel_data_are_decided_by_pillow() -> None:
    data = made(20, 10, colour=2)
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    packed = data[start + 8 : end - 4]
    header = data[start + 8 : start + 10]
    variants = {
        "unknown filter": packed_again(data, lambda rows: rows[:61] + b"\5" + rows[62:]),
        "a byte less": packed_again(data, lambda rows: rows[:-1]),
        "a byte more": packed_again(data, lambda rows: rows + b"\0"),
        "bytes after the stream": data[:start] + chunk(b"IDAT", packed + b"??") + data[end:],
        "wrong sum": data[:start] + chunk(b"IDAT", packed[:-1] + b"?") + data[end:],
        "no sum": data[:start] + chunk(b"IDAT", packed[:-4]) + data[end:],
        "window too large": data[:start] + chunk(b"IDAT", b"\x88\x1c" + packed[2:]) + data[end:],
        "pixels apart": data[:start] + chunk(b"IDAT", packed[:30]) + chunk(b"tEXt", b"A\0b")
        + chunk(b"IDAT", packed[30:]) + data[end:],
        "bytes after the end": data + b"more",
        "end with bytes": data[:end] + chunk(b"IEND", b"x"),
        "no end": data[:end],
        "no pixels": data[:start] + data[end:],
        "empty pixels": data[:start] + chunk(b"IDAT", b"") + data[end:],
    }  # fmt: skip
    assert header == b"\x78\x9c"
    for name, variant in variants.items():
        assert decoded(variant) is None, name
        agrees(variant)
    split = [chunk(b"IDAT", packed[i : i + 7]) for i in range(0, len(packed), 7)]
    joined = data[:start] + chunk(b"IDAT", b"") + b"".join(split) + data[end:]
    assert decoded(joined) is not None and agrees(joined)


def test_decompression_bombs_are_refused() -> None:
    """A header that claims more than the data hold; data that hold more than it claims."""
    claims = png(20_000, 20_000, rows=b"0")
    for read in (RegionDecoder().size, RegionDecoder().whole):
        with pytest.raises((OSError, ValueError)):
            read(claims)
    with pytest.raises(fast.LeftToPillow):
        fast.inflate(png(10_000, 10_000, rows=bytes(1000)), max_pixels=10**9)
    much = png(4, 4, rows=bytes(1 << 24))
    tracemalloc.start()
    with pytest.raises(fast.LeftToPillow):
        fast.inflate(much, max_pixels=16)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    agrees(png(4, 4, rows=bytes(1 << 20)))


def damaged(seed: int, *, count: int) -> Iterator[bytes]:
    """Changed bytes, with and without right checksums, cut and swapped chunks."""
    rng = random.Random(seed)
    options = {"exif": rotated(3), "icc_profile": bytes(500)}
    sources = [d for n, d in small_samples().items() if n.startswith("png")]
    sources += [made(9, 7, colour=colour, before=b"") for colour in COLOURS.values()]
    sources += [encoded(pixels(3), "PNG", **options), encoded(pixels(4), "PNG", **options)]
    for data in sources:
        for end in [at for at, _, _ in chunks_of(data)]:
            yield from (data[: end + more] for more in (0, 4, 8))
    for _ in range(count):
        data = bytearray(rng.choice(sources))
        kind = rng.randrange(5)
        if kind == 0:  # any byte
            for _ in range(rng.choice([1, 2, 8])):
                data[rng.randrange(min(rng.choice([60, len(data)]), len(data)))] ^= rng.randrange(
                    256
                )
        elif kind == 1:  # a byte of a chunk, whose checksum is right again
            at, name, body = rng.choice(list(chunks_of(bytes(data)))[:-1])
            if body:
                changed = bytearray(body)
                place = rng.randrange(len(body))
                if name == b"IHDR" and place < 8:  # Pillow would fill in very large images
                    place |= 3
                changed[place] = rng.randrange(256)
                data[at : at + 12 + len(body)] = chunk(name, bytes(changed))
        elif kind == 2:  # chunks left out, doubled, moved
            parts = [
                bytes(data[at : at + 12 + len(body)]) for at, _, body in chunks_of(bytes(data))
            ]
            parts.insert(rng.randrange(len(parts)), parts.pop(rng.randrange(len(parts))))
            parts[rng.randrange(len(parts))] *= rng.randrange(3)
            data = bytearray(data[:8] + b"".join(parts))
        elif kind == 3:  # inflated bytes, with right sums
            try:
                data = packed_again(bytes(data), lambda rows: mutated(rows, rng))
            except (ValueError, zlib.error):
                continue
        else:
            del data[rng.randrange(len(data)) :]
        yield bytes(data)


def mutated(rows: bytearray, rng: random.Random) -> bytes:
    rows[rng.randrange(len(rows))] = rng.randrange(8)
    return bytes(rows if rng.randrange(3) else rows[: rng.randrange(len(rows))])


def chunks_of(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield at, data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        at += 12 + length


def test_damaged_files_are_decided_as_by_pillow() -> None:
    num_read = num_taken = num = 0
    for data in damaged(0, count=600):
        num, num_taken = num + 1, num_taken + (decoded(data) is not None)
        num_read += agrees(data)
    assert num_taken < num_read < num and num_taken > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_damaged_files_are_decided_as_by_pillow(seed: int) -> None:
    for data in damaged(seed, count=20_000):
        agrees(data)
