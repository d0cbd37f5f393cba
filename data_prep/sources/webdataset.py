"""List WebDataset tars: members that share a key form a sample with an image and a label.

Only the image and its label are read; other members, such as pickles, never are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import BinaryIO

from data_prep.formats.members import Member, TarDefect, members
from data_prep.sources.files import file_containers, is_hidden, is_tar_name
from data_prep.sources.protocol import MAX_CLASS_LENGTH, Container, Input, Source, class_from_cell
from vitscale.config.errors import UserError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
# Stands for the suffix of whichever image a sample has; suffixes have no slash.
IMAGE = "/"
MAX_JSON_BYTES = 1 << 20


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
            for member, name, label, reason in self._rows(file):
                path, is_sample = f"{container.path}/{member.name}", reason in (None, "no_image")
                if is_sample and hash(name) in seen:
                    is_sample, label, reason = False, None, "duplicate_key"
                if is_sample:
                    seen.add(hash(name))
                else:
                    path += f" (byte {member.offset})"
                class_name = class_from_cell(label, None, self.labels)
                if reason is None and class_name is None and self.labels.values != "none":
                    reason = "no_label"
                item = Input(path, container.split, class_name, name, member.num_bytes, reason)
                item.file, item.offset = container.path, member.offset
                item.modified_ns = modified_ns
                yield item

    def _rows(self, file: BinaryIO) -> Iterator[tuple[Member, str, str | None, str | None]]:
        """Yield (member, name, label, reason) of samples, and of members outside them.

        Raises TarDefect after what is before the damage.
        """
        key, sample = "", dict[str, Member]()  # suffix -> consecutive member with the same key
        defect = None
        try:
            for member in members(file):
                if member.is_folder:
                    continue
                parts = split_member_name(member.name) if member.is_file else None
                if parts is None or is_hidden(member.name):
                    reason = "hidden" if is_hidden(member.name) else "other_name"
                    yield member, member.name, None, reason if member.is_file else "not_a_file"
                    continue
                if sample and parts[0] != key:
                    yield self._sample(file, key, sample)
                    sample = {}
                key, suffix = parts
                kind = IMAGE if suffix in IMAGE_SUFFIXES else suffix
                if kind in sample:
                    yield member, key, None, "duplicate_key"
                else:
                    sample[kind] = member
        except TarDefect as error:
            defect = error
        if sample:
            yield self._sample(file, key, sample)
        if defect is not None:
            raise defect

    def _sample(
        self, file: BinaryIO, key: str, sample: dict[str, Member]
    ) -> tuple[Member, str, str | None, str | None]:
        suffix, json_field = self.label
        label = read_label(file, sample[suffix], json_field) if suffix in sample else None
        if IMAGE in sample:
            return sample[IMAGE], key, label, None
        return next(iter(sample.values())), key, label, "no_image"


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
