"""List tars of one class each, in a folder or inside one large tar, such as ImageNet-21k."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from data_prep.formats.members import CompressedTarError, Member, TarDefect, members
from data_prep.sources.errors import compressed_tar_error, printable, raise_if_outage
from data_prep.sources.files import (
    SplitPlace,
    is_folder,
    is_hidden,
    is_tar_name,
    name_reason,
    split_places,
    stem_and_suffix,
)
from data_prep.sources.protocol import Container, Input, Source, Spool
from vitscale.config.errors import UserError

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst", ".tar.bz2", ".tar.lz4")


class ClassTars(Source):
    """Containers: the tar of each class; for a tar of tars also that tar itself."""

    has_label_values = False

    def containers(self) -> list[Container]:
        """Tars, ordered by split and the bytes of their path.

        Raises UserError for missing or overlapping splits, no tars, compressed tars.
        """
        found: list[Container] = []
        for place in split_places(self.settings, kind="file or folder"):
            full = self.root / place.path
            is_tar_of_tars = full.is_file()
            tars = (_tars_in_tar if is_tar_of_tars else _tars_in_folder)(full, place)
            if not tars:
                raise UserError(
                    f"{str(full)!r} contains no tar files",
                    where=place.where,
                    allowed="one tar of images per class",
                    next_step=None if is_tar_of_tars else _folder_with_tars(full),
                )
            if is_tar_of_tars:
                found.append(Container(place.path, place.split))
            found += sorted(tars, key=lambda tar: os.fsencode(tar.path))
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
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
                if class_name is None and _is_class_tar(member, name) and not is_repeated:
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


def _normalized(name: str) -> str:
    """Remove `./`, `//`, and slashes at either end of a member's name."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _is_class_tar(member: Member, name: str) -> bool:
    return member.is_file and is_tar_name(name)


def _tars_in_folder(folder: Path, place: SplitPlace) -> list[Container]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = os.path.join(place.path, entry.name)
            if entry.name.lower().endswith(COMPRESSED_SUFFIXES) and not is_hidden(entry.name):
                raise compressed_tar_error(path, entry.name.rpartition(".")[2])
            if is_tar_name(entry.name) and entry.is_file():
                class_name = printable(stem_and_suffix(entry.name)[0])
                found.append(Container(path, place.split, class_name))
    return found


def _folder_with_tars(folder: Path) -> str | None:
    """Name a sub-folder that has the tars which this folder lacks."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_folder(entry) and any(Path(entry.path).glob("*.tar")):
                return f"its sub-folder {entry.name!r} does: name it in source.splits"
    return None


def _tars_in_tar(path: Path, place: SplitPlace) -> list[Container]:
    found: dict[str, Container] = {}
    try:
        with open(path, "rb") as file:
            for member in members(file):
                name = _normalized(member.name)
                if _is_class_tar(member, name) and name not in found:
                    found[name] = Container(
                        path=f"{place.path}/{member.name}",
                        split=place.split,
                        class_name=printable(stem_and_suffix(os.path.basename(name))[0]),
                        file=place.path,
                        offset=member.offset,
                        num_bytes=member.num_bytes,
                    )
    except CompressedTarError as error:
        raise compressed_tar_error(place.path, error.method) from None
    except (TarDefect, OSError) as error:
        if isinstance(error, OSError):
            raise_if_outage(error, place.path)
        if not found or isinstance(error, OSError):
            what = f"{printable(place.path)!r} cannot be read as a tar file ({error})"
            raise UserError(what, where=place.where) from None
    return list(found.values())
