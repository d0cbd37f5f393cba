"""List WebDataset tars: members that share a key form a sample with an image and a label.

Only the image and its label are read; other members, such as pickles, never are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from data_prep.formats.members import Member, TarDefect, members
from data_prep.images.check import CheckedImage
from data_prep.sources.files import file_containers, is_hidden, is_tar_name
from data_prep.sources.protocol import (
    MAX_CLASS_LENGTH,
    Container,
    Input,
    Source,
    Spool,
    means_no_label,
)
from vitscale.config.errors import UserError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_JSON_BYTES = 1 << 20
Check = Callable[[Member], CheckedImage | None]


@dataclass(slots=True)
class _Sample:
    """Consecutive members with the same key."""

    key: str
    first: Member
    image: Member | None = None
    checked: CheckedImage | None = None
    class_name: str | None = None
    suffixes: set[str] = field(default_factory=set)


class WebDataset(Source):
    """Containers: every tar."""

    @property
    def label(self) -> tuple[str, str]:
        """(suffix of the label's member, JSON field in it). Raises UserError.

        `label`, the default of the setting, means `cls` here.
        """
        kind, _, name = self.settings.label.partition(":")
        if (kind in ("cls", "label") and not name) or (kind == "json" and name):
            return ("json" if name else "cls"), name
        raise UserError(
            f"{self.settings.label!r} is not a label of a WebDataset",
            where="source.label",
            allowed="cls, or json:FIELD",
        )

    def containers(self) -> list[Container]:
        """Raises UserError for missing files, a wrong source.label, patterns without a match."""
        assert self.label
        return file_containers(self.settings, is_tar_name, kind=".tar files")

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """One input per sample, and rows for members outside samples."""
        with open(self.root / container.path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for row in self.rows(file, container):
                row.modified_ns = modified_ns
                yield row

    def rows(
        self, file: BinaryIO, container: Container, *, check: Check = lambda member: None
    ) -> Iterator[Input]:
        """Yield the samples of one tar, which is read from its start to its end.

        check: called at each image. Raises TarDefect after what is before the damage.
        """
        suffix, json_field = self.label
        seen: set[int] = set()
        sample: _Sample | None = None
        defect = None
        try:
            for member in members(file):
                if member.is_folder:
                    continue
                parts = split_member_name(member.name) if member.is_file else None
                if parts is None or is_hidden(member.name):
                    reason = "hidden" if is_hidden(member.name) else "other_name"
                    reason = reason if member.is_file else "not_a_file"
                    yield _row(container, member, reason, place=True)
                    continue
                key, end = parts
                if sample is not None and key != sample.key:
                    yield self._sample_row(sample, container, seen)
                    sample = None
                sample = sample or _Sample(key, member)
                is_image = end in IMAGE_SUFFIXES
                if end in sample.suffixes or (is_image and sample.image is not None):
                    yield _row(container, member, "duplicate_key", key=key, place=True)
                    continue
                sample.suffixes.add(end)
                if is_image:
                    sample.image, sample.checked = member, check(member)
                elif end == suffix:
                    sample.class_name = read_label(file, member, json_field)
        except TarDefect as error:
            defect = error
        if sample is not None:
            yield self._sample_row(sample, container, seen)
        if defect is not None:
            raise defect

    def _sample_row(self, sample: _Sample, container: Container, seen: set[int]) -> Input:
        member = sample.image or sample.first
        if hash(sample.key) in seen:
            return _row(container, member, "duplicate_key", key=sample.key, place=True)
        seen.add(hash(sample.key))
        row = _row(container, member, None, key=sample.key)
        row.class_name, row.checked = sample.class_name, sample.checked
        if row.class_name is not None and means_no_label(row.class_name, self.labels):
            row.class_name = None
        if sample.image is None:
            row.reason = "no_image"
        elif row.class_name is None and self.labels.values != "none":
            row.reason = "no_label"
        return row


def split_member_name(name: str) -> tuple[str, str] | None:
    """(key, suffix in lower case), as in webdataset; None for members that it ignores.

    The key is the folder, plus the base name up to its first dot.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not stem or not dot or (name.startswith("__") and name.endswith("__") and not slash):
        return None
    return folder + slash + stem, suffix.lower()


def read_label(file: BinaryIO, member: Member, json_field: str) -> str | None:
    """A class as text: the member itself, or a string or integer in a field of its JSON."""
    if member.num_bytes > (MAX_JSON_BYTES if json_field else MAX_CLASS_LENGTH):
        return None
    file.seek(member.offset)
    data = file.read(member.num_bytes)
    try:
        value: object = data.decode("utf-8")
        if json_field:
            content = json.loads(data)
            value = content.get(json_field) if isinstance(content, dict) else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CLASS_LENGTH:
        return None
    # JSON can encode a lone surrogate, which cannot be stored as UTF-8.
    return None if any("\ud800" <= sign <= "\udfff" for sign in value) else value.strip()


def _row(
    container: Container,
    member: Member,
    reason: str | None,
    *,
    key: str | None = None,
    place: bool = False,
) -> Input:
    """place: the name is not unique in the tar; the offset makes it so."""
    path = f"{container.path}/{member.name}" + (f" (byte {member.offset})" if place else "")
    return Input(
        path,
        container.split,
        None,
        member.name if key is None else key,
        member.num_bytes,
        reason,
        container.path,
        member.offset,
    )
