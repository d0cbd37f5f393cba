"""List the members of tars: of one class each, or WebDataset tars of samples.

Tars of one class, such as ImageNet-21k's, are in a folder or inside one large tar. In a WebDataset
the members that share a key form a sample with an image and a label; only these two are read, other
members, such as pickles, never are.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from data_prep.sources.files import (
    file_containers,
    is_tar_name,
    member_path,
    name_reason,
    split_places,
    stem_and_suffix,
)
from data_prep.sources.protocol import (
    MAX_CLASS_LENGTH,
    Container,
    Input,
    Source,
    class_from_cell,
    compressed_tar_error,
    printable,
)
from vitscale.config.errors import UserError
from vitscale.data.folders import SYSTEM_FOLDERS, is_image_name
from vitscale.data.tar_members import CompressedTar, Member, TarDefect, members
from vitscale.data.webdataset import IMAGE_SUFFIXES

# Stands for the suffix of whichever image a sample has; suffixes have no slash.
IMAGE = "/"
MAX_JSON_BYTES = 1 << 20
Row = tuple[Member, str, str | None, str | None]
"""Member, name, label and reason."""


class ClassTars(Source):
    """Containers: the tar of each class. Other files beside them, or in a tar of them, are not."""

    has_label_values = False

    def containers(self) -> list[Container]:
        places = set(split_places(self.settings, kind="file or folder").values())
        found: list[Container] = []
        for tar in file_containers(self.settings, is_tar_name, kind="tar files"):
            # A tar that is named itself holds tars; one found in a folder holds images.
            if tar.path in places:
                found += self._inner_tars(tar)
            else:
                found.append(tar._replace(class_name=_class_of(tar.path)))
        return found

    def _inner_tars(self, outer: Container) -> list[Container]:
        """Class tars in a tar. Raises UserError if there are none, or if it is damaged."""
        path = outer.path
        found: dict[str, Container] = {}
        problem = "contains no tar files"
        with open(self.root / path, "rb") as file:
            try:
                for tar in members(file):
                    name = member_path(tar.name)
                    if not tar.is_file or not is_tar_name(name) or _is_hidden(name):
                        # Other members, such as lists, are no classes.
                        continue
                    if name in found:
                        raise TarDefect(f"it has {printable(name)!r} twice")
                    found[name] = Container(
                        f"{path}/{tar.name}",
                        outer.split,
                        _class_of(name),
                        path,
                        tar.offset,
                        tar.num_bytes,
                    )
            except CompressedTar:
                raise compressed_tar_error(path) from None
            except TarDefect as defect:
                problem = f"cannot be read as a tar file to its end ({defect})"
                found = {}

        # Tars of one split lie beside each other.
        folders = {os.path.dirname(name) for name in found}
        if len(folders) > 1:
            problem = "has tars in several folders, which may be splits"
        if len(folders) != 1:
            raise UserError(
                f"{printable(path)!r} {problem}",
                where="source.path",
                allowed="one tar of images per class, all in one folder",
            )
        return sorted(found.values(), key=lambda tar: os.fsencode(tar.path))

    def inputs(self, container: Container) -> Iterator[Input]:
        path = container.file or container.path
        end = container.offset + container.num_bytes if container.file else None

        # Hashes take less memory than the names of a million members.
        seen: set[int] = set()
        with open(self.root / path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for member in members(file, start=container.offset, end=end):
                if member.is_folder:
                    continue
                name = member_path(member.name)
                full = f"{container.path}/{member.name}"
                mode = stat.S_IFREG if member.is_file else 0
                reason = name_reason(name, mode, hidden=_is_hidden(name))
                # The place tells members of one name apart.
                if hash(name) in seen:
                    full += f" (byte {member.offset})"
                    reason = reason or "duplicate_name"
                seen.add(hash(name))
                stem = stem_and_suffix(name)[0]
                if self.labels.values == "none":
                    # Without classes, nothing but the tar tells its images apart.
                    stem = f"{container.class_name}/{stem}"

                yield Input(
                    full,
                    container.split,
                    container.class_name,
                    stem,
                    member.num_bytes,
                    reason,
                    file=path,
                    offset=member.offset,
                    modified_ns=modified_ns,
                )


def _class_of(tar: str) -> str:
    return printable(stem_and_suffix(os.path.basename(tar))[0])


def _is_hidden(member: str) -> bool:
    """Return True for hidden files, such as `._a.jpg` of macOS, and what is below system folders.

    Not for what lies below a hidden folder: that only says where the tar was packed.
    """
    parts = member.lower().split("/")
    return parts[-1].startswith(".") or not SYSTEM_FOLDERS.isdisjoint(parts)


class WebDataset(Source):
    """Containers: every tar."""

    @property
    def label(self) -> tuple[str, str]:
        """(suffix of the label's member, JSON field in it). Raises UserError.

        `label`, the default of the setting, means `cls` here.
        """
        kind, _, name = self.settings.label.partition(":")
        # `cls` and `label` take no field; `json` needs one.
        if (kind in ("cls", "label") and not name) or (kind == "json" and name):
            return ("json" if name else "cls"), name
        raise UserError(
            f"{self.settings.label!r} is not a label of a WebDataset",
            where="source.label",
            allowed="cls, or json:FIELD",
        )

    def containers(self) -> list[Container]:
        # A wrong setting is an error before any tar is read.
        assert self.label
        return file_containers(self.settings, is_tar_name, kind=".tar files")

    def inputs(self, container: Container) -> Iterator[Input]:
        """One input per sample, and rows for members outside samples."""
        seen: set[int] = set()
        with open(self.root / container.path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for member, name, label, reason in self._rows(file):
                path = f"{container.path}/{member.name}"
                # Other members have no key that could be there twice.
                is_sample = reason in (None, "no_image")
                if is_sample and hash(name) in seen:
                    is_sample = False
                    label = None
                    reason = "duplicate_key"
                if is_sample:
                    seen.add(hash(name))
                else:
                    path += f" (byte {member.offset})"

                class_name = class_from_cell(label, self.labels)
                item = Input(
                    path,
                    container.split,
                    class_name,
                    name,
                    member.num_bytes,
                    reason,
                    file=container.path,
                    offset=member.offset,
                    modified_ns=modified_ns,
                )
                yield self.labelled(item)

    def _rows(self, file: BinaryIO) -> Iterator[Row]:
        """Yield the rows of samples, and of members outside them.

        Raises TarDefect after what is before the damage.
        """
        # Members with the same key follow each other: suffix -> member.
        key = ""
        sample: dict[str, Member] = {}
        defect = None
        try:
            for member in members(file):
                if member.is_folder:
                    continue

                parts = split_member_name(member.name)
                reason = None
                if not member.is_file:
                    reason = "not_a_file"
                elif _is_hidden(member.name):
                    reason = "hidden"
                elif parts is None:
                    reason = "other_name"
                if parts is None or reason is not None:
                    yield member, member.name, None, reason
                    continue
                # Another key ends the sample.
                if sample and parts[0] != key:
                    yield from self._sample(file, key, sample)
                    sample = {}
                key, suffix = parts
                kind = IMAGE if suffix in IMAGE_SUFFIXES else suffix
                # A second image of the same key belongs to no sample.
                if kind in sample:
                    yield member, key, None, "duplicate_key"
                else:
                    sample[kind] = member
        except TarDefect as error:
            defect = error

        # Samples before the damage count.
        if sample:
            yield from self._sample(file, key, sample)
        if defect is not None:
            raise defect

    def _sample(
        self, file: BinaryIO, key: str, sample: dict[str, Member]
    ) -> Iterator[Row]:
        """Yield the row of a sample; one for each image where names with dots share its key."""
        suffix, json_field = self.label
        label = None
        if suffix in sample:
            label = read_label(file, sample[suffix], json_field)
        if IMAGE in sample:
            yield sample[IMAGE], key, label, None
            return
        # It has a member that looks like an image, or else its first one stands for it.
        images = [member for member in sample.values() if is_image_name(member.name)]
        for member in images or [next(iter(sample.values()))]:
            yield member, key, label, "no_image"


def split_member_name(name: str) -> tuple[str, str] | None:
    """(key, suffix in lower case), as in webdataset; None for members that it ignores.

    The key is the folder, plus the base name up to its first dot.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    # Names such as `__index__` belong to the writer.
    is_reserved = name.startswith("__") and name.endswith("__") and not slash
    if not stem or not dot or is_reserved:
        return None
    return folder + slash + stem, suffix.lower()


def read_label(file: BinaryIO, member: Member, json_field: str) -> str | None:
    """A class as text: the member itself, or a string or integer in a field of its JSON."""
    # A long member is no label, so it is not read.
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
        if isinstance(value, str) and value.encode():
            return value
        return None
    except (ValueError, RecursionError):
        return None
