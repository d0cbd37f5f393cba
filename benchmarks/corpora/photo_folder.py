"""Write a large folder of photographs, one sub-folder per class.

Owns: repeating given photographs under new names with distinct bytes; noise JPEGs of the same size
if none are given; the hashes that outputs are compared with.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from blake3 import blake3
from PIL import Image

from vitscale.config.errors import UserError

NOISE_PHOTOS = 64
NOISE_CLASSES = 16
PNG_START = b"\x89PNG"
PNG_HEADER = 33  # bytes of the signature and the header chunk


@dataclass(frozen=True)
class PhotoFolder:
    """Paths CLASS/NAME.JPEG or .png, and the hashes of their content."""

    root: Path
    digests: dict[str, bytes]
    num_bytes: int

    @cached_property
    def paths(self) -> list[str]:
        return sorted(self.digests)

    @cached_property
    def whole(self) -> bytes:
        """Hash of the concatenation of all files."""
        digest = blake3()
        for path in self.paths:
            digest.update((self.root / path).read_bytes())
        return digest.digest()


def with_comment(image: bytes, text: str) -> bytes:
    """The same picture with other bytes: a comment after the start of a JPEG or PNG."""
    comment = text.encode()
    if image.startswith(PNG_START):
        body = b"tEXtComment\0" + comment
        checksum = zlib.crc32(body).to_bytes(4, "big")
        part = (len(body) - 4).to_bytes(4, "big") + body + checksum
        return image[:PNG_HEADER] + part + image[PNG_HEADER:]
    assert image[:2] == b"\xff\xd8"
    return (
        image[:2]
        + b"\xff\xfe"
        + (len(comment) + 2).to_bytes(2, "big")
        + comment
        + image[2:]
    )


def as_png(photos: list[bytes], *, side: int | None) -> list[bytes]:
    """The pictures as PNG, resized to a square of `side` pixels if given."""
    coded = []
    for photo in photos:
        image = Image.open(io.BytesIO(photo), formats=["JPEG"]).convert("RGB")
        if side is not None:
            image = image.resize((side, side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "PNG")
        coded.append(file.getvalue())
    return coded


def given_photos(source: Path) -> list[bytes]:
    """The JPEG files of a folder or of a tar."""
    if source.is_dir():
        found = [
            path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()
        ]
    else:
        with tarfile.open(source) as tar:
            files = [tar.extractfile(member) for member in tar if member.isfile()]
            found = [file.read() for file in files if file is not None]
    photos = [data for data in found if data[:2] == b"\xff\xd8"]
    if not photos:
        raise UserError("contains no JPEG files", where=f"--images {source}")
    return photos


def noise_photos(
    *, width: int = 500, height: int = 375, num: int = NOISE_PHOTOS
) -> list[bytes]:
    """Blurred noise that compresses to about the size of ImageNet's photographs (110 kB)."""
    photos = []
    for seed in range(num):
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
        fine = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        file = io.BytesIO()
        Image.blend(smooth, Image.fromarray(fine), 0.2).save(file, "JPEG", quality=85)
        photos.append(file.getvalue())
    return photos


def write_photo_folder(
    root: Path, photos: list[bytes], *, total_bytes: int
) -> PhotoFolder:
    """Repeat `photos` until they make `total_bytes`; every file differs from every other."""
    digests: dict[str, bytes] = {}
    written = 0
    for path, data in _repeated(photos):
        if written >= total_bytes:
            break
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        digests[path] = blake3(data).digest()
        written += len(data)
    os.sync()
    return PhotoFolder(root, digests, written)


def _repeated(photos: list[bytes]) -> Iterator[tuple[str, bytes]]:
    num_classes = min(len(photos), 400)
    turn = 0
    while True:
        for i, photo in enumerate(photos):
            label = f"n{i % num_classes:08d}"
            suffix = "png" if photo.startswith(PNG_START) else "JPEG"
            yield (
                f"{label}/{label}_{i}_{turn}.{suffix}",
                with_comment(photo, f"copy {turn}"),
            )
        turn += 1


def part_of(folder: PhotoFolder, root: Path, *, num: int) -> PhotoFolder:
    """A random part of the files, under the same paths, without copying them."""
    chosen = random.Random(0).sample(folder.paths, min(num, len(folder.paths)))
    num_bytes = 0
    for path in chosen:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(folder.root / path, root / path)
        num_bytes += (root / path).stat().st_size
    return PhotoFolder(root, {path: folder.digests[path] for path in chosen}, num_bytes)
