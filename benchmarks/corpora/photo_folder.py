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
JPEG_START = b"\xff\xd8"
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
        # A chunk's length leaves out its name of four letters, which the checksum covers.
        length = (len(body) - 4).to_bytes(4, "big")
        chunk = length + body + checksum
        return image[:PNG_HEADER] + chunk + image[PNG_HEADER:]

    assert image.startswith(JPEG_START)
    # A segment's length counts its own two bytes.
    length = (len(comment) + 2).to_bytes(2, "big")
    segment = b"\xff\xfe" + length + comment
    return image[:2] + segment + image[2:]


def as_png(photos: list[bytes], *, side: int | None) -> list[bytes]:
    """The pictures as PNG, resized to a square of `side` pixels if given."""
    encoded = []
    for photo in photos:
        stored = Image.open(io.BytesIO(photo), formats=["JPEG"])
        # CMYK photographs have no form in PNG.
        image = stored.convert("RGB")
        if side is not None:
            image = image.resize((side, side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "PNG")
        encoded.append(file.getvalue())
    return encoded


def given_photos(source: Path) -> list[bytes]:
    """The JPEG files of a folder or of a tar."""
    contents = []
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                contents.append(path.read_bytes())
    else:
        with tarfile.open(source) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                file = tar.extractfile(member)
                assert file is not None
                contents.append(file.read())

    # By content, since ImageNet has PNG files with the suffix .JPEG.
    photos = [data for data in contents if data.startswith(JPEG_START)]
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
        coarse = _noise(rng, width // 2, height // 2)
        enlarged = coarse.resize((width, height), Image.Resampling.BICUBIC)
        # Pure noise hardly compresses: its files would be larger, and slower to decode.
        image = Image.blend(enlarged, _noise(rng, width, height), 0.2)

        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        photos.append(file.getvalue())
    return photos


def _noise(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_photo_folder(
    root: Path, photos: list[bytes], *, total_bytes: int
) -> PhotoFolder:
    """Repeat `photos` until they make `total_bytes`; every file differs from every other."""
    digests: dict[str, bytes] = {}
    written = 0
    for path, data in _repeated(photos):
        if written >= total_bytes:
            break
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        digests[path] = blake3(data).digest()
        written += len(data)

    # Otherwise the disk would still write these pages while the first candidate is timed.
    os.sync()
    return PhotoFolder(root, digests, written)


def _repeated(photos: list[bytes]) -> Iterator[tuple[str, bytes]]:
    num_classes = min(len(photos), 400)
    turn = 0
    while True:
        for i, photo in enumerate(photos):
            # Named as in ImageNet, whose suffix make_shards has to read too.
            label = f"n{i % num_classes:08d}"
            suffix = "JPEG"
            if photo.startswith(PNG_START):
                suffix = "png"
            path = f"{label}/{label}_{i}_{turn}.{suffix}"

            # Distinct bytes give each file a hash of its own, by which the checks tell them apart.
            data = with_comment(photo, f"copy {turn}")
            yield path, data
        turn += 1


def part_of(folder: PhotoFolder, root: Path, *, num: int) -> PhotoFolder:
    """A random part of the files, under the same paths, without copying them."""
    num = min(num, len(folder.paths))
    # The same part in every call, so that the rounds of two calls compare.
    chosen = random.Random(0).sample(folder.paths, num)
    num_bytes = 0
    for path in chosen:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        # A link shares the pages in the cache, so the part is read from memory as the whole is.
        os.link(folder.root / path, file)
        num_bytes += file.stat().st_size

    digests = {path: folder.digests[path] for path in chosen}
    return PhotoFolder(root, digests, num_bytes)
