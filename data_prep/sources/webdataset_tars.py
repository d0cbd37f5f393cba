"""List WebDataset tars: members that share a key form a sample with an image and a label.

Owns: grouping members into samples like the webdataset package, finding image and label.
Leaves out: the tar format (`shards.tar_walk`), listing the tars (`file_lists`).

Only the image and its label are read; other members, such as pickles, never are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from data_prep.shards.tar_walk import (
    CompressedTar,
    TarDefect,
    TarFile,
    TarMember,
    pread,
    walk_tar,
)
from data_prep.sources.class_tars import compressed_tar_error, tar_row
from data_prep.sources.file_lists import FileList
from data_prep.sources.outages import raise_if_outage
from data_prep.sources.paths import is_hidden, is_tar_name, opened, stat_listed
from data_prep.sources.protocol import Container, Input, Spool, means_no_label
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_CLASS_BYTES = 4096
MAX_JSON_BYTES = 1 << 20
HAS_IMAGE, HAS_LABEL = 1, 2


@dataclass(slots=True)
class _Sample:
    """Consecutive members with the same key."""

    key: str
    first: TarMember
    image: TarMember | None = None
    label: TarMember | None = None
    suffixes: set[str] = field(default_factory=set)

    @property
    def parts(self) -> int:
        return (HAS_IMAGE if self.image else 0) | (HAS_LABEL if self.label else 0)


@dataclass(frozen=True, slots=True)
class WebdatasetTars:
    """Containers: every tar, and per split the folder of its tars."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    has_label_values: ClassVar[bool] = True

    @property
    def root(self) -> Path:
        return self._files.root

    @property
    def _files(self) -> FileList:
        return FileList(self.settings, is_tar_name, ".tar files")

    @property
    def label(self) -> tuple[str, str | None]:
        """(suffix of the label's member, JSON field in it). Raises UserError.

        `label`, the default of the setting, means `cls` here.
        """
        label = "cls" if self.settings.label == "label" else self.settings.label
        kind, colon, name = label.partition(":")
        if label == "cls" or (kind == "json" and name):
            return kind, name if colon else None
        raise UserError(
            f"{self.settings.label!r} is not a label of a WebDataset",
            where="source.label",
            allowed="cls, or json:FIELD",
        )

    def containers(self) -> list[Container]:
        """Raises UserError(s) for missing files, a wrong source.label, patterns without a match."""
        assert self.label
        return self._files.containers()

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """One input per sample, and rows for members outside samples and files beside the tars."""
        if self._files.is_folder(container):
            return self._files.other_files(container)
        return self._tar_inputs(container)

    def _tar_inputs(self, container: Container) -> Iterator[Input]:
        root, path = self.root, container.path
        status = stat_listed(root, path)
        size, modified_ns = status.st_size, status.st_mtime_ns
        try:
            with opened(root, path) as fd:
                yield from self.rows(fd, container, num_bytes=size, modified_ns=modified_ns)
        except OSError as error:
            raise_if_outage(error, path)
            yield tar_row(container, "unreadable", num_bytes=size, modified_ns=modified_ns)

    def rows(
        self, file: TarFile, container: Container, *, num_bytes: int, modified_ns: int
    ) -> Iterator[Input]:
        """The samples of one tar, and a row for the tar itself if it is damaged."""
        try:
            members = walk_tar(file, end=num_bytes)
            for row in _sample_rows(file, members, container=container, label=self.label):
                row.modified_ns = modified_ns
                if row.class_name is not None and means_no_label(row.class_name, self.labels):
                    row.class_name, row.reason = None, row.reason or "no_label"
                if row.reason == "no_label" and self.labels.values == "none":
                    row.reason = None
                yield row
        except CompressedTar as defect:
            raise compressed_tar_error(container.path, defect.method) from None
        except TarDefect:
            yield tar_row(container, "truncated_tar", num_bytes=num_bytes, modified_ns=modified_ns)


def split_member_name(name: str) -> tuple[str, str] | None:
    """(key, suffix in lower case), as in webdataset; None for members that it ignores.

    The key is the folder, plus the base name up to its first dot.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not stem or not dot or (name.startswith("__") and name.endswith("__") and not slash):
        return None
    return folder + slash + stem, suffix.lower()


def _sample_rows(
    fd: TarFile,
    members: Iterator[TarMember],
    *,
    container: Container,
    label: tuple[str, str | None],
) -> Iterator[Input]:
    """Rows of one tar. In a truncated tar, the row of the last sample comes before the tar's."""
    seen: dict[int, int] = {}
    sample: _Sample | None = None
    defect: TarDefect | None = None
    walk = _until_defect(members)
    for member in walk:
        if isinstance(member, TarDefect):
            defect = member
            break
        if member.kind == "folder":
            continue
        parts = split_member_name(member.name) if member.kind == "file" else None
        if parts is None or is_hidden(member.name):
            yield _row_without_sample(container, member)
            continue
        key, suffix = parts
        if sample is not None and key != sample.key:
            yield _sample_row(fd, sample, seen, container=container, label=label)
            sample = None
        sample = sample or _Sample(key, member)
        if suffix in sample.suffixes or (suffix in IMAGE_SUFFIXES and sample.image is not None):
            other = sample.image or sample.first
            path = _path_with_offsets(container, member, other.offset)
            yield _row(container, member, path=path, key=key, reason="duplicate_key")
            continue
        sample.suffixes.add(suffix)
        if suffix in IMAGE_SUFFIXES:
            sample.image = member
        elif suffix == label[0]:
            sample.label = member
    if sample is not None:
        yield _sample_row(fd, sample, seen, container=container, label=label)
    if defect is not None:
        raise defect


def _until_defect(members: Iterator[TarMember]) -> Iterator[TarMember | TarDefect]:
    try:
        yield from members
    except CompressedTar:
        raise
    except TarDefect as defect:
        yield defect


def _sample_row(
    fd: TarFile,
    sample: _Sample,
    seen: dict[int, int],
    *,
    container: Container,
    label: tuple[str, str | None],
) -> Input:
    """The row of a complete sample. `seen`: hash of key -> offset and parts of earlier ones."""
    member = sample.image or sample.first
    code = hash(sample.key)
    before = seen.get(code)
    if before is not None:
        both = sample.parts & before & HAS_IMAGE
        seen[code] = before | sample.parts
        path = _path_with_offsets(container, member, before >> 2)
        reason = "duplicate_key" if both else "split_sample"
        return _row(container, member, path=path, key=sample.key, reason=reason)
    seen[code] = member.offset << 2 | sample.parts
    if sample.image is None:
        return _row(container, member, key=sample.key, reason="no_image")
    class_name = read_label(fd, sample.label, label[1]) if sample.label else None
    missing = "no_label" if class_name is None else None
    return _row(container, member, key=sample.key, class_name=class_name, reason=missing)


def read_label(fd: TarFile, member: TarMember, json_field: str | None) -> str | None:
    """A class as text: the member itself, or a string or integer in a field of its JSON."""
    limit = MAX_CLASS_BYTES if json_field is None else MAX_JSON_BYTES
    if member.num_bytes > limit:
        return None
    data = pread(fd, member.num_bytes, member.offset)
    try:
        value: object = data.decode("utf-8")
        if json_field is not None:
            content = json.loads(data)
            value = content.get(json_field) if isinstance(content, dict) else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CLASS_BYTES:
        return None
    # JSON can encode a lone surrogate, which cannot be stored as UTF-8.
    return value.strip() if _is_text(value) else None


def _is_text(value: str) -> bool:
    return not any("\ud800" <= sign <= "\udfff" for sign in value)


def _row_without_sample(container: Container, member: TarMember) -> Input:
    """Row of a member outside any sample; the offset makes its name unique."""
    path = f"{container.path}/{member.name} (byte {member.offset})"
    reason = "hidden" if is_hidden(member.name) else "other_name"
    if member.kind != "file":
        reason = "not_a_file"
    return _row(container, member, path=path, key=member.name, reason=reason)


def _path_with_offsets(container: Container, member: TarMember, first: int) -> str:
    return f"{container.path}/{member.name} (bytes {first} and {member.offset})"


def _row(
    container: Container,
    member: TarMember,
    *,
    key: str,
    path: str | None = None,
    class_name: str | None = None,
    reason: str | None = None,
) -> Input:
    return Input(
        path or f"{container.path}/{member.name}",
        container.split,
        class_name,
        key,
        member.num_bytes,
        reason,
        container.path,
        member.offset,
    )
