"""Find the images that a command reads: files, folders of files, or a split of shards.

An image that cannot be read is a blank row of the batch and a reason, not the end of the command.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitscale.config.errors import UserError
from vitscale.data.folders import IMAGE_SUFFIXES, files_below, is_image_name
from vitscale.data.index import (
    MANIFEST_NAME,
    NO_LABEL,
    SplitIndex,
    read_split,
    sample_keys,
)
from vitscale.data.remote import is_url
from vitscale.data.samples import Samples, Unreadable, reason_of
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.evaluation.samples import EvaluationResize, EvaluationSamples
from vitscale.images.crops import open_image
from vitscale.images.plain import ALL_FORMATS, UPRIGHT, orientation, rgb_pixels

MAX_FILE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class Images:
    """Numbered images: a split of shards, or files."""

    index: SplitIndex | None = None
    paths: Sequence[str] = ()
    """Files; without an index."""
    num_left_out: int = 0
    """Files in folders that are no images by their name."""

    @property
    def total(self) -> int:
        return len(self.paths) if self.index is None else self.index.num_samples

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Keys, or paths; a name that is no UTF-8 would break a table."""
        if self.index is not None:
            return sample_keys(self.index, numbers)
        paths = (os.fsencode(self.paths[number]) for number in numbers)
        return [path.decode(errors="backslashreplace") for path in paths]

    def label_name(self, label: int) -> str | None:
        """The true class, where the shards have it."""
        # Files have no labels, and shards need not have them.
        if self.index is None or label == NO_LABEL:
            return None
        return self.index.classes[label]

    def samples(self, settings: DataSettings, *, image_size: int) -> Samples:
        # Shards were prepared, so their images need no conversion.
        if self.index is not None:
            return EvaluationSamples(
                self.index, settings=settings, image_size=image_size, strict=False
            )
        return FileSamples(self.paths, settings=settings, image_size=image_size)


def shard_folder(paths: Sequence[str]) -> str | None:
    """The shard folder or URL that `images` is; None for files and folders of files.

    Raises UserError for shards beside other inputs.
    """
    # The manifest tells a shard folder from a folder of images.
    shards = [
        path for path in paths if is_url(path) or (Path(path) / MANIFEST_NAME).is_file()
    ]
    if shards and len(paths) > 1:
        raise UserError(
            f"{shards[0]!r} is a shard folder, and {len(paths)} inputs are given",
            where="images",
            allowed="image files and folders of images, or one shard folder",
        )
    if not shards:
        return None
    return shards[0]


def find_files(given: Sequence[str]) -> Images:
    """Files as given; of folders every image below, sorted by path. Hidden ones are left out.

    Raises UserError if there are no images.
    """
    # A file that is named is read whatever its name; in a folder the name decides.
    paths: list[str] = []
    num_left_out = 0
    for path in given:
        if not os.path.isdir(path):
            paths.append(path)
            continue
        try:
            below = list(files_below(path))
        except OSError as error:
            raise UserError(
                f"cannot be read ({error.strerror})", where=error.filename
            ) from None
        # A photograph in an unknown format is listed as unreadable; a text file is no image at all.
        images = [file for file in below if is_image_name(file)]
        paths += sorted(images, key=os.fsencode)
        num_left_out += len(below) - len(images)

    if not paths:
        raise UserError(
            f"no images in {', '.join(map(repr, given))}; {num_left_out:,} other files",
            where="images",
            allowed=f"names in {', '.join(IMAGE_SUFFIXES)}",
        )
    return Images(paths=paths, num_left_out=num_left_out)


def images_of_split(
    folder: str, *, split: str, remote: RemoteSettings, key: str = "split"
) -> Images:
    """The images of a shard folder or its URL. key: the setting that names the split.

    Raises UserError if they are not there.
    """
    index = read_split(folder, split=split, key=key, remote_settings=remote)
    return Images(index=index)


class FileSamples(Samples):
    """Image files that were not prepared: rotated by EXIF, transparent or with 16 bits, too."""

    def __init__(
        self, paths: Sequence[str], *, settings: DataSettings, image_size: int
    ) -> None:
        self.paths = paths
        self.shape = (3, image_size, image_size)
        self.resize = EvaluationResize(settings, image_size=image_size)

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        path = self.paths[position]
        try:
            data = _bounded_bytes(path)
            self.resize(data, out, pixels_HW3=converted_pixels(data))
        except (OSError, ValueError) as error:
            # One image must not end a command over thousands; the table has its reason.
            out.zero_()
            return NO_LABEL, [Unreadable(0, position, path, reason_of(error))]
        return NO_LABEL, []


def converted_pixels(data: bytes) -> torch.Tensor | None:
    """The pixels of an image that was not prepared, as decoded from shards, uint8 [H, W, 3]; None
    for an image that decoders turn into the same pixels, faster. Raises like `open_image`."""
    with open_image(data, formats=ALL_FORMATS) as image:
        # The decoders of shards know neither EXIF nor transparency; a plain JPEG has neither.
        if data.startswith(b"\xff\xd8\xff") and orientation(image) == UPRIGHT:
            return None
        return torch.from_numpy(rgb_pixels(image))


def _bounded_bytes(path: str) -> bytes:
    """The content of a regular file of bounded size. Raises OSError or ValueError."""
    # A pipe must not wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{status.st_size:,} bytes; at most {MAX_FILE_BYTES:,}")
        # The file may grow while it is read.
        return file.read(MAX_FILE_BYTES)
