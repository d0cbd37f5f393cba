"""List tars of one class each, in a folder or inside one large tar, such as ImageNet-21k."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace

from data_prep.formats.members import TarDefect, compressed_tar_error, members
from data_prep.sources.files import (
    file_containers,
    is_hidden,
    is_tar_name,
    name_reason,
    split_places,
    stem_and_suffix,
)
from data_prep.sources.protocol import Container, Input, Source, printable
from vitscale.config.errors import UserError

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst", ".tar.bz2", ".tar.lz4")


class ClassTars(Source):
    """Containers: the tar of each class. Other files beside them, or in a tar of them, are not."""

    has_label_values = False

    def containers(self) -> list[Container]:
        """Tars, ordered by split and the bytes of their path.

        Raises UserError for missing or overlapping splits, no tars, compressed tars.
        """
        places = {place.path for place in split_places(self.settings, kind="file or folder")}
        found: list[Container] = []
        for tar in file_containers(self.settings, _is_tar_name, kind="tar files"):
            if tar.path in places:
                found += self._inner_tars(tar)
            else:
                found.append(replace(tar, class_name=_class_of(tar.path)))
        return found

    def _inner_tars(self, outer: Container) -> list[Container]:
        """Class tars in a tar. Raises UserError if there are none, or if it is damaged."""
        path, split = outer.path, outer.split
        found: dict[str, Container] = {}
        problem = "contains no tar files"
        with open(self.root / path, "rb") as file:
            try:
                for tar in members(file):
                    name = _normalized(tar.name)
                    if tar.is_file and is_tar_name(name):
                        place = (f"{path}/{tar.name}", split, _class_of(name))
                        found.setdefault(name, Container(*place, path, tar.offset, tar.num_bytes))
            except TarDefect as defect:
                problem = f"cannot be read as a tar file to its end ({defect})"
                found = {}
        if not found:
            what, allowed = f"{printable(path)!r} {problem}", "one tar of images per class"
            raise UserError(what, where="source.path", allowed=allowed)
        return sorted(found.values(), key=lambda tar: os.fsencode(tar.path))

    def inputs(self, container: Container) -> Iterator[Input]:
        """Every member of a class tar, without folders."""
        path = container.file or container.path
        end = container.offset + container.num_bytes if container.file else None
        seen: set[int] = set()
        with open(self.root / path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for member in members(file, start=container.offset, end=end):
                if member.is_folder:
                    continue
                name, full = _normalized(member.name), f"{container.path}/{member.name}"
                mode = stat.S_IFREG if member.is_file else 0
                reason = name_reason(name, mode, hidden=is_hidden(name))
                if hash(name) in seen:
                    full += f" (byte {member.offset})"
                    reason = reason or "duplicate_name"
                seen.add(hash(name))
                stem = stem_and_suffix(name)[0]
                if self.labels.values == "none":
                    # Without classes, nothing but the tar tells its images apart.
                    stem = f"{container.class_name}/{stem}"
                item = Input(full, container.split, container.class_name, stem, member.num_bytes)
                item.reason, item.file, item.offset = reason, path, member.offset
                item.modified_ns = modified_ns
                yield item


def _class_of(tar: str) -> str:
    return printable(stem_and_suffix(os.path.basename(tar))[0])


def _is_tar_name(name: str) -> bool:
    """Raise UserError for a compressed tar."""
    if name.lower().endswith(COMPRESSED_SUFFIXES) and not is_hidden(name):
        raise compressed_tar_error(name, name.rpartition(".")[2])
    return is_tar_name(name)


def _normalized(name: str) -> str:
    """Remove `./`, `//`, and slashes at either end of a member's name."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))
