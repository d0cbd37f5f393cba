"""List tars of one class each, in a folder or inside one large tar, such as ImageNet-21k."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace

from data_prep.formats.members import CompressedTarError, TarDefect, members
from data_prep.sources.files import (
    file_containers,
    is_hidden,
    is_tar_name,
    name_reason,
    split_places,
    stem_and_suffix,
)
from data_prep.sources.protocol import Container, Input, Source, compressed_tar_error, printable
from vitscale.config.errors import UserError

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst", ".tar.bz2", ".tar.lz4")


class ClassTars(Source):
    """Containers: the tar of each class; for a tar of tars also that tar itself."""

    has_label_values = False

    def containers(self) -> list[Container]:
        """Tars, ordered by split and the bytes of their path.

        Raises UserError for missing or overlapping splits, no tars, compressed tars.
        """
        places = {place.path for place in split_places(self.settings, kind="file or folder")}
        found: list[Container] = []
        for tar in file_containers(self.settings, _is_tar_name, kind="tar files"):
            found.append(tar)
            if tar.path in places:
                found += self._inner_tars(tar)
            else:
                name = stem_and_suffix(os.path.basename(tar.path))[0]
                found[-1] = replace(tar, class_name=printable(name))
        return found

    def _inner_tars(self, outer: Container) -> list[Container]:
        """Class tars in a tar. Raises UserError if there are none."""
        found: dict[str, Container] = {}
        with open(self.root / outer.path, "rb") as file:
            try:
                for member in members(file):
                    name = _normalized(member.name)
                    if member.is_file and is_tar_name(name) and name not in found:
                        class_name = printable(stem_and_suffix(os.path.basename(name))[0])
                        found[name] = replace(
                            outer,
                            path=f"{outer.path}/{member.name}",
                            class_name=class_name,
                            file=outer.path,
                            offset=member.offset,
                            num_bytes=member.num_bytes,
                        )
            except CompressedTarError as error:
                raise compressed_tar_error(outer.path, error.method) from None
            except TarDefect as defect:
                if not found:
                    what = f"{printable(outer.path)!r} cannot be read as a tar file ({defect})"
                    raise UserError(what, where="source.path") from None
        if not found:
            raise UserError(
                f"{printable(outer.path)!r} contains no tar files",
                where="source.path",
                allowed="one tar of images per class",
            )
        return sorted(found.values(), key=lambda tar: os.fsencode(tar.path))

    def inputs(self, container: Container) -> Iterator[Input]:
        """Members of a class tar; of a tar of tars those that are no class tars."""
        path, class_name = container.file or container.path, container.class_name
        end = container.offset + container.num_bytes if container.file else None
        seen: set[int] = set()
        with open(self.root / path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            for member in members(file, start=container.offset, end=end):
                if member.is_folder:
                    continue
                name = _normalized(member.name)
                is_repeated = hash(name) in seen
                seen.add(hash(name))
                is_class_tar = member.is_file and is_tar_name(name)
                if class_name is None and is_class_tar and not is_repeated:
                    continue
                mode = stat.S_IFREG if member.is_file else 0
                reason = name_reason(name, mode, hidden=is_hidden(name))
                if is_repeated and reason in (None, "other_name"):
                    reason = "duplicate_name"
                if reason is None and class_name is None:
                    reason = "no_class"
                stem = stem_and_suffix(name)[0]
                if self.labels.values == "none" and class_name is not None:
                    # Without classes, nothing but the tar tells its images apart.
                    stem = f"{class_name}/{stem}"
                full = f"{container.path}/{member.name}"
                yield Input(
                    f"{full} (byte {member.offset})" if is_repeated else full,
                    container.split,
                    class_name,
                    stem,
                    member.num_bytes,
                    reason,
                    path,
                    member.offset,
                    modified_ns,
                )


def _is_tar_name(name: str) -> bool:
    """Raise UserError for a compressed tar."""
    if name.lower().endswith(COMPRESSED_SUFFIXES) and not is_hidden(name):
        raise compressed_tar_error(name, name.rpartition(".")[2])
    return is_tar_name(name)


def _normalized(name: str) -> str:
    """Remove `./`, `//`, and slashes at either end of a member's name."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))
