"""List idx files with images and labels, as MNIST, Fashion-MNIST, EMNIST and KMNIST come.

Owns: names of the files, headers, sizes and checksums, each image as a PNG.
Leaves out: listing the folder (`file_lists`).

The format (http://yann.lecun.com/exdb/mnist, "THE IDX FILE FORMAT"): two zero bytes, the type of
the values (8: unsigned byte), the number of dimensions, each size as a big-endian 32-bit number,
then the values, last dimension fastest. Values have no checksum but gzip's, so that a file is
checked to its end before its first image is used.
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from data_prep.images.header import DEFLATE_MAX_RATIO
from data_prep.sources.file_lists import FileList
from data_prep.sources.outages import changed_source_error, printable, raise_if_outage
from data_prep.sources.parquet_rows import TableDefect
from data_prep.sources.paths import is_hidden, link_reason, source_root, stat_watched
from data_prep.sources.protocol import Container, Input, Spool, Watched, class_from_cell
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

IMAGES_NAME = re.compile(r"(.+)-images([-.])idx[34]-ubyte(\.gz)?", re.DOTALL)
LABELS_NAME = re.compile(r".+-labels[-.]idx1-ubyte(\.gz)?", re.DOTALL)
UBYTE = 8
READ_BYTES = 1 << 20
MAX_IMAGE_BYTES = 64 << 20
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# PNG's colour types by number of channels (PNG specification, 11.2.2 IHDR).
COLOUR_TYPES = {1: 0, 3: 2}
# Deflate's blocks without compression (RFC 1951, 3.2.4).
MAX_STORED_BLOCK = 65_535


@dataclass(frozen=True, slots=True)
class IdxFiles:
    """Containers: every file of images, and per split the folder of its files."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    has_label_values: ClassVar[bool] = True

    @property
    def root(self) -> Path:
        return source_root(self.settings)

    @property
    def _files(self) -> FileList:
        """A split that names neither a file nor a folder is the first part of a file name."""
        splits = {
            split: text if (self.root / text).exists() else f"{text}-images*"
            for split, text in self.settings.splits.items()
        }
        settings = self.settings.model_copy(update={"splits": splits})
        return FileList(settings, is_images_name, "idx files of images (NAME-images-idx3-ubyte)")

    def containers(self) -> list[Container]:
        """Raises UserErrors for files without labels, or with another number of labels."""
        found = self._files.containers()
        files = [box.path for box in found if not self._files.is_folder(box)]
        errors: list[UserError] = []
        for path in files:
            if f"{path}.gz" in files:
                errors.append(_twice(path))
            try:
                self._check_numbers(path)
            except (TableDefect, OSError):
                continue  # `inputs` gives it a row in the ledger
            except UserError as error:
                errors.append(error)
        if errors:
            raise UserErrors(errors)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input | Watched]:
        """Every image of a file, whose PNG is put into the spool; one row for a damaged file."""
        if self._files.is_folder(container):
            yield from replace(self._files, is_wanted=is_idx_name).other_files(container)
            return
        is_sound = True
        for path in filter(None, (container.path, self._labels_path(container.path))):
            status = stat_watched(self.root, path)
            yield Watched(path, status.st_size, status.st_mtime_ns)
            reason = self._fault(path)
            if reason is not None:
                is_sound = False
                damaged = Input(path, container.split, None, "", status.st_size, reason)
                damaged.modified_ns = status.st_mtime_ns
                yield damaged
        if is_sound:
            yield from self._images(container, spool)

    def _images(self, container: Container, spool: Spool) -> Iterator[Input]:
        path = container.path
        modified_ns = stat_watched(self.root, path).st_mtime_ns
        names = IMAGES_NAME.fullmatch(os.path.basename(path))
        assert names is not None
        self._check_numbers(path)
        try:
            for row, (image, label) in enumerate(self._rows(path)):
                class_name = class_from_cell(label, None, self.labels)
                file, offset = spool.add(image)
                yield Input(
                    f"{path}/{row}",
                    container.split,
                    class_name,
                    f"{names[1]}-{row}",
                    len(image),
                    None,
                    file,
                    offset,
                    modified_ns,
                    spooled=True,
                )
        except TableDefect:  # it was sound a moment ago
            raise changed_source_error(path) from None

    def _rows(self, path: str) -> Iterator[tuple[bytes, int | None]]:
        """(PNG, label) of each image."""
        labels_path = self._labels_path(path)
        with opened_idx(self.root, path) as images:
            num, height, width = images.sizes[:3]
            channels = prod(images.sizes[3:])
            if labels_path is None:
                for _ in range(num):
                    yield to_png(images.read(height * width * channels), width, channels), None
                return
            with opened_idx(self.root, labels_path) as labels:
                for _ in range(num):
                    image = images.read(height * width * channels)
                    yield to_png(image, width, channels), labels.read(1)[0]

    def _check_numbers(self, path: str) -> None:
        """Raises UserError if labels are missing or too many or few, TableDefect, OSError."""
        labels_path = self._labels_path(path)
        with opened_idx(self.root, path) as images:
            num_images = images.sizes[0]
        if labels_path is None:
            return
        with opened_idx(self.root, labels_path) as labels:
            num_labels = labels.sizes[0]
        if num_images != num_labels:
            raise UserError(
                f"{printable(path)!r} has {num_images:,} images, "
                f"{printable(labels_path)!r} has {num_labels:,} labels",
                where="source.path",
                next_step="get both files from one release",
            )

    def _labels_path(self, path: str) -> str | None:
        """The file of labels beside a file of images; None if the classes come from elsewhere."""
        if not self.labels.need_source_class:
            return None
        names = IMAGES_NAME.fullmatch(os.path.basename(path))
        assert names is not None
        plain = os.path.join(os.path.dirname(path), f"{names[1]}-labels{names[2]}idx1-ubyte")
        real_root = os.path.realpath(self.root)
        for labels_path in sorted((plain, f"{plain}.gz"), reverse=names[3] is not None):
            full = os.path.join(self.root, labels_path)
            if os.path.isfile(full) and not link_reason(full, real_root=real_root, real_folders=()):
                return labels_path
        raise UserError(
            f"{printable(path)!r} has no labels beside it",
            where="source.path",
            allowed=f"{printable(os.path.basename(plain))}, also packed as .gz",
            next_step="get that file; or set labels.values=none for shards without labels",
        )

    def _fault(self, path: str) -> str | None:
        """Why nothing of a file is used."""
        try:
            with opened_idx(self.root, path) as file:
                file.check_end()
        except TableDefect:
            return "damaged_table"
        except OSError as error:
            raise_if_outage(error, path)
            return "unreadable"
        return None


@dataclass(frozen=True, slots=True)
class IdxFile:
    """An open file, behind its header."""

    file: BinaryIO
    sizes: tuple[int, ...]
    """[n] of labels; [n, height, width] or [n, height, width, channels] of images."""

    def read(self, num_bytes: int) -> bytes:
        """The next values. Raises TableDefect if there are fewer."""
        return _read(self.file, num_bytes)

    def check_end(self) -> None:
        """Read all values. Raises TableDefect if their number or gzip's checksum is wrong."""
        left = prod(self.sizes)
        while left:
            left -= len(self.read(min(left, READ_BYTES)))
        with _defects():
            if self.file.read(1):
                raise TableDefect("too long")


@contextmanager
def opened_idx(root: Path, path: str) -> Iterator[IdxFile]:
    """Open a file and read its header.

    Raises TableDefect for a header that is damaged or claims more than the file can hold, OSError
    for unreadable files, UserError for too large images.
    """
    try:
        fd = os.open(root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise changed_source_error(path) from None
    with os.fdopen(fd, "rb") as raw:
        packed = path.endswith(".gz")
        file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        sizes = _sizes(file, is_labels=LABELS_NAME.fullmatch(os.path.basename(path)) is not None)
        if prod(sizes) > os.fstat(fd).st_size * (DEFLATE_MAX_RATIO if packed else 1):
            raise TableDefect("claims more than the file can hold")
        if prod(sizes[1:]) > MAX_IMAGE_BYTES:
            raise UserError(
                f"{printable(path)!r}: each image takes {prod(sizes[1:]) >> 20:,} MiB, more than "
                f"{MAX_IMAGE_BYTES >> 20:,}",
                where="source.path",
                next_step="write such images as files, and use source.kind=image_folder",
            )
        yield IdxFile(file, sizes)


def _sizes(file: BinaryIO, *, is_labels: bool) -> tuple[int, ...]:
    zeros, kind, num_sizes = struct.unpack(">HBB", _read(file, 4))
    if zeros or kind != UBYTE or num_sizes not in ((1,) if is_labels else (3, 4)):
        raise TableDefect("not an idx file of unsigned bytes")
    sizes = struct.unpack(f">{num_sizes}I", _read(file, 4 * num_sizes))
    if 0 in sizes[1:] or (num_sizes == 4 and sizes[3] not in COLOUR_TYPES):
        raise TableDefect("neither grey nor RGB images")
    return sizes


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    with _defects():
        data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise TableDefect("too short")
    return data


@contextmanager
def _defects() -> Iterator[None]:
    """Turn gzip's errors into TableDefect."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TableDefect(str(error)) from None


def to_png(values: bytes, width: int, channels: int) -> bytes:
    """A PNG of the rows of an image, grey or RGB.

    It is not compressed: its bytes, and with them the sizes that a second run compares, do not
    depend on a version of zlib. Tars hold multiples of 512 bytes, so small images take no more.
    """
    row_bytes = width * channels
    starts = range(0, len(values), row_bytes)
    rows = b"".join(b"\0" + values[start : start + row_bytes] for start in starts)  # 0: no filter
    pieces = [b"\x78\x01"]  # zlib's header (RFC 1950)
    for start in range(0, len(rows), MAX_STORED_BLOCK):
        block = rows[start : start + MAX_STORED_BLOCK]
        is_last = start + len(block) == len(rows)
        pieces += [struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF), block]
    pieces.append(struct.pack(">I", zlib.adler32(rows)))
    header = struct.pack(">IIBBBBB", width, len(starts), 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b"".join(pieces)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def is_images_name(name: str) -> bool:
    return IMAGES_NAME.fullmatch(name) is not None and not is_hidden(name)


def is_idx_name(name: str) -> bool:
    """Whether a name is that of a file of images or labels."""
    return is_images_name(name) or (LABELS_NAME.fullmatch(name) is not None and not is_hidden(name))


def _twice(path: str) -> UserError:
    return UserError(
        f"{printable(path)!r} is there twice, also packed as .gz",
        where="source.path",
        next_step="remove one of the two",
    )
