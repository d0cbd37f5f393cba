from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.image_check import check_image, check_image_bytes


def encoded(format: str, *, size: tuple[int, int] = (9, 7), mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format=format)
    return file.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A few bytes whose header claims any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("format, extension", [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_good_images_are_named_by_content(format: str, extension: str) -> None:
    data = encoded(format)
    facts = check_image_bytes(data, max_pixels=100)
    assert facts.reason is None
    assert (facts.extension, facts.width, facts.height) == (extension, 9, 7)
    assert (facts.sha256, facts.num_bytes) == (hashlib.sha256(data).digest(), len(data))


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"<!DOCTYPE html><html>", "not_an_image"),
        (encoded("GIF", mode="P"), "not_an_image"),
        (encoded("JPEG", size=(64, 64))[:-900], "bad_pixels"),
        (encoded("PNG", size=(64, 64))[:-900], "bad_pixels"),
        (encoded("WEBP", size=(64, 64))[:-900], "bad_header"),
        (png_claiming(60_000, 60_000), "too_many_pixels"),
        (encoded("PNG", mode="I;16"), "deep_grey"),
    ],
)
def test_unusable_content_is_rejected_with_its_reason(data: bytes, reason: str) -> None:
    assert check_image_bytes(data, max_pixels=10_000).reason == reason


def test_files_that_cannot_be_read_and_empty_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").write_bytes(b"")
    assert check_image(str(tmp_path / "empty.jpg"), max_pixels=10).reason == "empty"
    assert check_image(str(tmp_path / "none.jpg"), max_pixels=10).reason == "unreadable"
