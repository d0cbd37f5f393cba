"""What frozen teachers say of the views of training images, computed once and read with them.

A row has the answers of all teachers to one view of one image, then the hash of these bytes. A file
has the rows of one tar in one view, in the order of its samples; `targets.json`, written last, says
what they are the targets of. See docs/data_format.md.
Needs no torch. Leaves out what the bytes of a row mean (`target_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from vitscale.config.errors import UserError
from vitscale.config.section import Problems
from vitscale.data.index import SplitIndex, check_sizes, read_file
from vitscale.data.order import ORDER_VERSION
from vitscale.data.positions import read_shard
from vitscale.data.remote import (
    HASH_BYTES,
    Location,
    RemoteFile,
    has_hash,
    location_of,
    open_cache,
    prefix_of_hash,
)
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.distributed.atomic_files import json_text

HEADER_NAME = "targets.json"
Precision = Literal["fp32", "bf16", "int8"]
VALUE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
SCALE_BYTES = 4
# Settings of `data` that decide the pixels of a view.
OF_VIEWS = (
    "crop crop_area crop_aspect crop_share horizontal_flip interpolation antialias augment mean std"
).split()
AGAIN = "run vitscale prepare targets again"


@dataclass(frozen=True, kw_only=True)
class TeacherTargets:
    """What is stored of one teacher: the class token, then the patches, as vectors."""

    fingerprint: str
    """Hash of the file with its weights."""
    width: int
    grid: tuple[int, int] | None
    """Rows and columns of patches; None: the class token alone."""

    @property
    def num_vectors(self) -> int:
        rows, columns = self.grid or (0, 0)
        return 1 + rows * columns


@dataclass(frozen=True, kw_only=True)
class Header:
    """Contents of targets.json."""

    format_version: Literal[1] = 1
    teachers: tuple[TeacherTargets, ...]
    precision: Precision
    views: int
    """Epoch e of a training has the pixels and the targets of view e modulo this."""
    images: dict[str, Any]
    """All that decides which images are seen, and the pixels of their views."""
    files: dict[str, str]
    """BLAKE3 by name; empty until all are there."""

    @property
    def content_bytes(self) -> int:
        """Bytes of a row without its hash."""
        total = 0
        for teacher in self.teachers:
            total += teacher.num_vectors * teacher.width * VALUE_BYTES[self.precision]
            if self.precision == "int8":
                total += teacher.num_vectors * SCALE_BYTES
        return total

    @property
    def row_bytes(self) -> int:
        return self.content_bytes + HASH_BYTES


def images_of(
    parts: Sequence[SplitIndex],
    settings: DataSettings,
    *,
    image_size: int,
    seed: int,
) -> dict[str, Any]:
    """`Header.images` of a run: plain values, as JSON gives them back."""
    # All decoders give the same pixels.
    return {
        **settings.model_dump(mode="json", include={*OF_VIEWS}),
        "image_size": image_size,
        "seed": seed,
        "order_version": ORDER_VERSION,
        "shards": [part.fingerprint for part in parts],
    }


def target_problems(data: DataSettings) -> Problems:
    """Settings with which the crops of a training have no targets."""
    if data.is_streamed:
        yield "data.reader", "tars without an index have no targets; make an index"
    if data.repeats > 1:
        yield "data.repeats", "would repeat the crop that has a target; set it to 1"
    if data.mixing is not None:
        yield "data.mixing", "mixed images have no targets; set it to null"


def file_name(part: int, view: int, shard: int) -> str:
    """Name of the file with the targets of one view of the samples of one tar."""
    return f"view-{view}/{part}-{shard:06d}.bin"


def read_header(folder: Location) -> Header:
    """Read targets.json. Raises UserError where there is none that this version wrote."""
    path = folder / HEADER_NAME
    try:
        return TypeAdapter(Header).validate_json(read_file(path))
    except (OSError, ValidationError) as error:
        raise UserError(
            f"there are no targets, or of another version ({error})",
            where=path,
            next_step="correct the path, or make them with vitscale prepare targets",
        ) from None


@dataclass(frozen=True, kw_only=True)
class StoredTargets:
    """Targets of the images of a run."""

    folder: Location
    header: Header
    fingerprint: str
    """Hash of the whole header."""
    lengths: Sequence[np.ndarray]
    """Samples of each tar of each set of shards."""
    remote: RemoteSettings

    def file(self, part: int, epoch: int, shard: int) -> Path | RemoteFile:
        """The file of a tar in an epoch, whose view it has."""
        name = file_name(part, epoch % self.header.views, shard)
        place = self.folder / name
        if isinstance(place, Path):
            return place
        return RemoteFile(
            place,
            int(self.lengths[part][shard]) * self.header.row_bytes,
            self.header.files[name],
            open_cache(self.remote.cache_path),
            int(self.remote.cache_gib * 2**30),
        )

    def read(self, file: Path | RemoteFile, row: int) -> memoryview:
        """A row of a file, without its hash. Raises UserError for damaged bytes."""
        num_bytes = self.header.row_bytes
        place = {"offset": row * num_bytes, "num_bytes": num_bytes}
        try:
            if isinstance(file, RemoteFile):
                data = file.read(**place, hash_prefix=None)
            else:
                data = read_shard(file, **place)
                if not has_hash(data):
                    raise OSError("its bytes do not have their hash")
        except OSError as error:
            raise UserError(
                f"row {row} of the targets is damaged ({error})",
                where=str(file),
                next_step=f"copy the file again; or remove it, and {AGAIN}",
            ) from None
        return memoryview(data)[:-HASH_BYTES]


def open_targets(
    place: str,
    parts: Sequence[SplitIndex],
    images: dict[str, Any],
    *,
    remote: RemoteSettings,
) -> StoredTargets:
    """Open the targets of a run, and refuse those of other images, and incomplete ones.

    images: `images_of` the run. Raises UserError. Whether the bytes are whole shows when they are
    read: each row has its hash.
    """
    folder = location_of(place, where="objective.targets")
    header = read_header(folder)
    if not header.files:
        raise UserError("the targets are not complete", where=place, next_step=AGAIN)
    check_same(header.images, images, where=place)
    lengths = [part.shard_lengths for part in parts]
    targets = StoredTargets(
        folder=folder,
        header=header,
        fingerprint=f"{prefix_of_hash(json_text(asdict(header)).encode()):016x}",
        lengths=lengths,
        remote=remote,
    )

    if isinstance(folder, Path):
        files = [
            (targets.file(part, view, shard), length * header.row_bytes)
            for part, of_shard in enumerate(lengths)
            for shard, length in enumerate(of_shard.tolist())
            for view in range(header.views)
        ]
        check_sizes(files, what="targets", where=folder, again=AGAIN)
        # The hashes of thousands of files are those of a URL alone.
        targets = replace(targets, header=replace(header, files={}))
    return targets


def check_same(
    before: dict[str, Any], now: dict[str, Any], *, where: Path | str
) -> None:
    """Raise UserError where targets are not those of this run. before: what their header says."""
    rows = [
        f"\n    {key}: targets {before.get(key)!r}, this run {value!r}"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if rows:
        raise UserError(
            f"these are targets of other images, views or teachers{''.join(rows)}",
            where=where,
            next_step="undo the change, or make targets for this run in another folder (vitscale "
            "prepare targets)",
        )
