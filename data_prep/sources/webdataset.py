"""List WebDataset tars: members that share a key form a sample with an image and a label.

Only the image and its label are read; other members, such as pickles, never are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from data_prep.formats.members import Member, TarDefect, members
from data_prep.sources.files import file_containers, is_hidden, is_tar_name
from data_prep.sources.protocol import MAX_CLASS_LENGTH, Container, Input, Source, class_from_cell
from vitscale.config.errors import UserError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_JSON_BYTES = 1 << 20


@dataclass(slots=True)
class _Sample:
    """Consecutive members with the same key."""

    key: str
    first: Member
    image: Member | None = None
    label: str | None = None
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

    def inputs(self, container: Container) -> Iterator[Input]:
        """One input per sample, and rows for members outside samples."""
        seen: set[int] = set()
        with open(self.root / container.path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for member, reason, name, sample in self._samples(file):
                is_unique = sample is not None and hash(name) not in seen
                if sample is not None:
                    seen.add(hash(name))
                    reason = None if is_unique else "duplicate_key"
                path = f"{container.path}/{member.name}"
                item = Input(
                    path if is_unique else f"{path} (byte {member.offset})",
                    container.split,
                    None,
                    name,
                    member.num_bytes,
                    reason,
                    container.path,
                    member.offset,
                    modified_ns,
                )
                if sample is not None and is_unique:
                    item.class_name = class_from_cell(sample.label, None, self.labels)
                    if sample.image is None:
                        item.reason = "no_image"
                    elif item.class_name is None and self.labels.values != "none":
                        item.reason = "no_label"
                yield item

    def _samples(self, file: BinaryIO) -> Iterator[tuple[Member, str | None, str, _Sample | None]]:
        """Yield (member, reason, name, sample) of samples, and of members outside them.

        Raises TarDefect after what is before the damage.
        """
        suffix, json_field = self.label
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
                    yield member, reason, member.name, None
                    continue
                key, end = parts
                if sample is not None and key != sample.key:
                    yield sample.image or sample.first, None, sample.key, sample
                    sample = None
                sample = sample or _Sample(key, member)
                is_image = end in IMAGE_SUFFIXES
                if end in sample.suffixes or (is_image and sample.image is not None):
                    yield member, "duplicate_key", key, None
                    continue
                sample.suffixes.add(end)
                if is_image:
                    sample.image = member
                elif end == suffix:
                    sample.label = read_label(file, member, json_field)
        except TarDefect as error:
            defect = error
        if sample is not None:
            yield sample.image or sample.first, None, sample.key, sample
        if defect is not None:
            raise defect


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
        value: object = data.decode()
        if json_field:
            content = json.loads(data)
            value = content.get(json_field) if isinstance(content, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        # JSON can encode a lone surrogate, which cannot be stored as UTF-8.
        return value if isinstance(value, str) and value.encode() else None
    except (ValueError, RecursionError):
        return None
