"""Entry points: the same pixels from less of the file, and files of them that may be damaged."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.required import skip_or_fail
from vitscale.config.errors import UserError
from vitscale.images.crops import CropBox, CropRequest
from vitscale.images.decoders import _extension, decode_region, missing
from vitscale.images.jpeg import entry_points
from vitscale.images.jpeg.entry_points import (
    _open,
    entry_points_file,
    find_entry_points,
    read_entry_points,
    require_entry_points,
    write_entry_points,
)

CODINGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "fine": {"subsampling": "4:4:4", "quality": 100, "optimize": True},
    "coarse": {"subsampling": "4:2:0", "quality": 5},
    "grey": {},
}
SIZE = 9


@pytest.fixture(autouse=True)
def extension() -> None:
    why = missing("region")
    if why is not None:
        skip_or_fail(f"the region decoder does not work here: {why}")
    require_entry_points(where="this machine")


def jpeg(coding: str, *, width: int = 203, height: int = 117, seed: int = 0) -> bytes:
    """Noise of 6 px, so that DC values and lengths differ from block to block."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    image, file = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC), None
    file = io.BytesIO()
    (image.convert("L") if coding == "grey" else image).save(file, "JPEG", **CODINGS[coding])
    return file.getvalue()


def cut(data: bytes, box: CropBox, points: bytes) -> tuple[bool, np.ndarray]:
    """Whether our own decoder was used, and the pixels."""
    request = CropRequest(box=box, size=SIZE, interpolation="bilinear", antialias=True, flip=False)
    pixels = np.zeros((3, SIZE, SIZE), np.uint8)
    return decode_region(data, replace(request, entry_points=points), pixels), pixels


def boxes(width: int, height: int, *, num: int, seed: int = 0) -> list[CropBox]:
    random = np.random.default_rng(seed)
    lefts, tops = random.integers(0, width, num), random.integers(0, height, num)
    return [
        CropBox(int(x), int(y), int(random.integers(1, width - x + 1)), int(height - y))
        if i % 2
        else CropBox(int(x), int(y), int(width - x), int(random.integers(1, height - y + 1)))
        for i, (x, y) in enumerate(zip(lefts, tops, strict=True))
    ]


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("every", [1, 3, 16, 255])
def test_pixels_are_those_without_entry_points(coding: str, every: int) -> None:
    for seed, (width, height) in enumerate([(203, 117), (16, 90), (129, 17), (320, 33)]):
        data = jpeg(coding, width=width, height=height, seed=seed)
        points = find_entry_points(data, every=every)
        assert points
        whole = CropBox(0, 0, width, height)
        for box in (whole, *boxes(width, height, num=12, seed=seed)):
            used, expected = cut(data, box, b"")
            again, found = cut(data, box, points)
            assert used and again and np.array_equal(found, expected), box


@pytest.mark.parametrize("coding", ["4:4:4", "4:2:0", "grey"])
def test_what_is_above_and_beside_the_box_is_not_decoded(coding: str) -> None:
    """Damage there ends decoding from the top, and is not seen from the entry points."""
    data, box = jpeg(coding), CropBox(150, 80, 20, 16)
    points = find_entry_points(data, every=2)
    _, expected = cut(data, box, b"")
    place = data.index(b"\xff\xda") + 40
    part = data[place : place + 60]
    # No marker is made or lost.
    changed = bytes(
        byte if 0xFF in (before, byte, byte ^ 0x2A) else byte ^ 0x2A
        for before, byte in zip(data[place - 1 :], part, strict=False)
    )
    broken = data[:place] + changed + data[place + 60 :]
    try:
        assert not np.array_equal(cut(broken, box, b"")[1], expected)
    except ValueError:
        pass  # libjpeg sees the damage
    used, found = cut(broken, box, points)
    assert used and np.array_equal(found, expected)


def test_images_that_can_have_none() -> None:
    image, data = Image.fromarray(np.zeros((40, 40, 3), np.uint8)), jpeg("4:2:0")
    for options in ({"progressive": True}, {"restart_marker_blocks": 2}, {"keep_rgb": True}):
        file = io.BytesIO()
        image.save(file, "JPEG", **options)
        assert find_entry_points(file.getvalue()) == b""
    for broken in (b"", b"\xff\xd8\xff", data[:-200], data[:-2] + b"\x00\xff\xd9"):
        assert find_entry_points(broken) == b""
    with pytest.raises(ValueError, match="each 1 to 255 MCUs"):
        _extension().entries(data, 0, 1000)


@pytest.mark.parametrize("coding", CODINGS)
def test_any_bytes_are_safe(coding: str) -> None:
    """Entry points that are not of the file give pixels or an error, and never a crash."""
    data = jpeg(coding)
    points, random = find_entry_points(data, every=4), np.random.default_rng(1)
    num_used = 0
    for box in boxes(203, 117, num=300):
        broken = bytearray(points)
        for place in random.integers(2, len(points), int(random.integers(1, 20))):
            broken[place] = random.integers(256)
        used, pixels = cut(data, box, bytes(broken))
        assert pixels.shape == (3, SIZE, SIZE)
        num_used += used
    assert 0 < num_used < 300
    # Of another geometry, version or spacing: not used, so the pixels are right.
    other = find_entry_points(jpeg(coding, width=320), every=4)
    for wrong in (other, points[:-1], points + b"\x00", b"\x02" + points[1:], b"\x01\x00", b"\x01"):
        for box in boxes(203, 117, num=3):
            assert np.array_equal(cut(data, box, wrong)[1], cut(data, box, b"")[1])


def test_damage_of_a_file_is_seen(tmp_path: Path) -> None:
    path = entry_points_file(tmp_path, "train-000000.tar")
    assert path == tmp_path / "entry_points/train-000000.jpt"
    known = {1 << 63: b"abcdef", 5: b"ghi", 7: b""}
    write_entry_points(path, known)
    assert {key: read_entry_points(path, key=key) for key in (*known, 6)} == known | {6: b""}
    data = path.read_bytes()
    for place in range(len(data)):
        for broken in (
            data[:place],
            bytes([*data[:place], data[place] ^ 0x41, *data[place + 1 :]]),
        ):
            path.write_bytes(broken)
            _open.cache_clear()
            assert all(read_entry_points(path, key=key) in (b"", known[key]) for key in known)
    path.unlink()
    _open.cache_clear()
    assert read_entry_points(path, key=5) == b""


def test_a_machine_without_the_extension_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "find_entry_points", lambda image: b"")
    with pytest.raises(UserError, match="needs AVX2 and the C extension"):
        require_entry_points(where="x")
