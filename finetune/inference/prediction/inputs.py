"""Find the images to predict: files, folders of files, or a split of shards.

An image that cannot be read is a blank row of the batch and a reason, not the end of the command.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from finetune.inference.prediction.settings import PredictRun
from vitscale.config.errors import UserError
from vitscale.data.index import MANIFEST_NAME, NO_LABEL, SplitIndex, read_split
from vitscale.data.index_keys import sample_keys
from vitscale.data.samples import EvaluationResize, EvaluationSamples
from vitscale.data.settings import DataSettings
from vitscale.data.urls import is_url
from vitscale.data.workers.samples import Samples, Unreadable
from vitscale.images.photographs import converted_pixels

# Files with these names are images; others in a folder are left out.
SUFFIXES = frozenset("jpg jpeg jpe jfif mpo png apng webp".split())
# Images that are not read are listed with that reason.
OTHER_SUFFIXES = frozenset("bmp gif tif tiff heic heif avif jp2 ppm".split())
MAX_FILE_BYTES = 512 * 2**20


class Inputs(Protocol):
    """The images by number, in the order of the output."""

    num_images: int
    num_left_out: int
    """Files in folders that are no images by their name."""

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Path of each file, or key of each sample."""
        ...

    def label_name(self, label: int) -> str | None:
        """The true class, where the shards have it."""
        ...

    def samples(self, settings: DataSettings, *, image_size: int) -> Samples:
        """Reads and resizes them."""
        ...


def find_inputs(run: PredictRun) -> Inputs:
    """Raises UserError for paths that do not exist, and shards beside other images."""
    shards = [each for each in run.images if is_url(each) or (Path(each) / MANIFEST_NAME).is_file()]
    if shards and len(run.images) > 1:
        raise UserError(
            f"{shards[0]!r} is a shard folder, and {len(run.images)} inputs are given",
            where="images",
            allowed="image files and folders of images, or one shard folder",
        )
    if shards:
        return Shards(
            read_split(shards[0], split=run.split, key="split", remote_settings=run.remote)
        )
    return find_files(run.images)


# ---- files --------------------------------------------------------------------------------------


class Paths:
    """Paths as one string of bytes: a fourth of the memory of a list, and worker processes share
    it, while every look at an item of a list copies its page."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> bytes:
        return self._bytes[self._ends[number] : self._ends[number + 1]]


class Files:
    """Image files."""

    def __init__(self, paths: Paths, *, num_left_out: int) -> None:
        self.paths, self.num_images, self.num_left_out = paths, len(paths), num_left_out

    def names(self, numbers: Sequence[int]) -> list[str]:
        # A name that is no UTF-8 would break the table.
        return [self.paths[number].decode(errors="backslashreplace") for number in numbers]

    def label_name(self, label: int) -> str | None:
        return None

    def samples(self, settings: DataSettings, *, image_size: int) -> Samples:
        return FileSamples(self.paths, settings=settings, image_size=image_size)


def find_files(given: Sequence[str]) -> Files:
    """Files as given; of folders every image below, sorted by path. Hidden ones are left out.

    Raises UserError for a path that does not exist, and if there are no images.
    """
    missing = [each for each in given if not os.path.exists(each)]
    if missing:
        what = f"no such file or folder: {', '.join(map(repr, missing))}"
        raise UserError(what, where="images")
    paths: list[str] = []
    num_left_out = 0
    for each in given:
        if not os.path.isdir(each):
            paths.append(each)
            continue
        below = list(_walk(each))
        images = sorted((path for path in below if _is_image_name(path)), key=os.fsencode)
        paths += images
        num_left_out += len(below) - len(images)
    if not paths:
        what = f"no images in {', '.join(map(repr, given))}; {num_left_out:,} other files"
        raise UserError(what, where="images", allowed=f"names in .{', .'.join(sorted(SUFFIXES))}")
    return Files(Paths(paths), num_left_out=num_left_out)


def _walk(folder: str) -> Iterator[str]:
    """Visible files below; links to folders are not followed."""

    def failed(error: OSError) -> None:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=str(error.filename)) from None

    for path, folders, files in os.walk(folder, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(path, name) for name in files if not name.startswith("."))


def _is_image_name(path: str) -> bool:
    return _suffix(path) in SUFFIXES | OTHER_SUFFIXES


def _suffix(path: str) -> str:
    return path.rpartition(".")[2].lower()


class FileSamples(Samples):
    """Photographs as they are: also rotated by EXIF, transparent or with 16 bits per sample."""

    def __init__(self, paths: Paths, *, settings: DataSettings, image_size: int) -> None:
        self.paths, self.image_size = paths, image_size
        self.resize = EvaluationResize(settings, image_size=image_size)

    def fill(self, position: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        path = os.fsdecode(self.paths[position])
        try:
            data = _bounded_bytes(path)
            pixels_HW3 = converted_pixels(data)
            if pixels_HW3 is None:
                self.resize(data, out)
            else:
                self.resize.of_pixels(pixels_HW3, out)
        except (OSError, ValueError) as error:
            out.zero_()
            return NO_LABEL, [Unreadable(0, position, path, reason(error))]
        return NO_LABEL, []


def reason(error: Exception) -> str:
    """Why an image cannot be read; without addresses, so that equal damage has equal reasons."""
    text = getattr(error, "strerror", None) or str(error)
    return re.sub(r" <.* at 0x[0-9a-f]+>", "", text)


def _bounded_bytes(path: str) -> bytes:
    """The content of a regular file of bounded size. Raises OSError or ValueError."""
    if (suffix := _suffix(path)) in OTHER_SUFFIXES:
        raise ValueError(f"{suffix.upper()} is not read; convert it to JPEG, PNG or WebP")
    # A pipe must not wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"{status.st_size:,} bytes; at most {MAX_FILE_BYTES:,}")
        return file.read(MAX_FILE_BYTES)


# ---- shards -------------------------------------------------------------------------------------


class Shards:
    """Samples of one split."""

    num_left_out = 0

    def __init__(self, index: SplitIndex) -> None:
        self.index, self.num_images = index, index.num_samples

    def names(self, numbers: Sequence[int]) -> list[str]:
        return sample_keys(self.index, numbers)

    def label_name(self, label: int) -> str | None:
        return self.index.classes[label] if label != NO_LABEL else None

    def samples(self, settings: DataSettings, *, image_size: int) -> Samples:
        return ShardSamples(self.index, settings=settings, image_size=image_size)


class ShardSamples(EvaluationSamples):
    """Of an evaluation, but unreadable samples are reported and do not end the command."""

    def fill(self, sample: int, out: torch.Tensor) -> tuple[int, list[Unreadable]]:
        try:
            self.resize(self.reader.bytes_of(sample), out)
        except UserError:
            raise  # the storage cannot be accessed
        except (OSError, ValueError) as error:
            out.zero_()
            return self.reader.label(sample), [self.reader.unreadable(sample, error)]
        return self.reader.label(sample), []
