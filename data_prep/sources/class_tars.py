"""List tars of one class each, in a folder or inside one large tar, such as ImageNet-21k."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from data_prep.formats.members import CompressedTarError, Member, TarDefect, members
from data_prep.sources.errors import printable, raise_if_outage
from data_prep.sources.files import (
    SplitPlace,
    is_folder,
    is_hidden,
    is_tar_name,
    name_reason,
    source_root,
    split_places,
    stat_listed,
    stem_and_suffix,
)
from data_prep.sources.protocol import Container, Input, Spool
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst", ".tar.bz2", ".tar.lz4")


@dataclass(frozen=True, slots=True)
class ClassTars:
    """Containers: the tar of each class; for a tar of tars also that tar itself."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    """Only whether classes are ignored: the tar names the class."""
    has_label_values: ClassVar[bool] = False

    @property
    def root(self) -> Path:
        return source_root(self.settings)

    def containers(self) -> list[Container]:
        """Tars, ordered by split and the bytes of their path.

        Raises UserError(s) for missing or overlapping splits, no tars, compressed tars.
        """
        found: list[Container] = []
        errors: list[UserError] = []
        for place in split_places(self.settings, kind="file or folder"):
            is_tar_of_tars = (self.root / place.path).is_file()
            try:
                tars = (_tars_in_tar if is_tar_of_tars else _tars_in_folder)(self.root, place)
            except UserError as error:
                errors.append(error)
                continue
            if is_tar_of_tars:
                found.append(Container(place.path, place.split))
            found += sorted(tars, key=lambda tar: os.fsencode(tar.path))
        if errors:
            raise UserErrors(errors)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Members of a class tar; of a tar of tars those that are no class tars.

        A damaged tar has a row of its own, after those of the members before the damage.
        """
        path = container.file or container.path
        status = stat_listed(self.root, path)
        num_bytes = container.num_bytes if container.file else status.st_size
        ignores_classes = self.labels.values == "none"
        reason = "truncated_tar"
        try:
            with open(self.root / path, "rb") as file:
                end = container.offset + num_bytes
                for row in _rows(file, container, path, end):
                    row.modified_ns = status.st_mtime_ns
                    if ignores_classes and container.class_name is not None:
                        # Without classes, nothing but the tar tells its images apart.
                        row.name = f"{row.class_name}/{row.name}"
                    yield row
            return
        except CompressedTarError as error:
            raise compressed_tar_error(container.path, error.method) from None
        except TarDefect:
            pass
        except OSError as error:
            raise_if_outage(error, path)
            reason = "unreadable"
        yield tar_row(container, reason, num_bytes=num_bytes, modified_ns=status.st_mtime_ns)


def compressed_tar_error(path: str, method: str) -> UserError:
    return UserError(
        f"{printable(path)!r} is compressed with {method}: its images cannot be read one by one",
        where="source.path",
        allowed="plain tar files",
        next_step="uncompress it first (gunzip, unxz, ...); its size hardly changes",
    )


def tar_row(container: Container, reason: str, *, num_bytes: int, modified_ns: int) -> Input:
    """Make the row of a damaged or unreadable tar; members before the damage have rows too."""
    return Input(
        container.path,
        container.split,
        container.class_name,
        stem_and_suffix(os.path.basename(container.path))[0],
        num_bytes,
        reason,
        container.file,
        container.offset,
        modified_ns,
    )


def _rows(file: BinaryIO, container: Container, path: str, end: int) -> Iterator[Input]:
    seen: set[int] = set()
    for member in members(file, start=container.offset, end=end):
        if member.is_folder:
            continue
        name = _normalized(member.name)
        is_repeated = hash(name) in seen
        seen.add(hash(name))
        if container.class_name is None and _is_class_tar(member, name) and not is_repeated:
            continue
        mode = stat.S_IFREG if member.is_file else 0
        reason = name_reason(name, mode, hidden=is_hidden(name))
        if is_repeated and reason in (None, "other_name"):
            reason = "duplicate_name"
        if reason is None and container.class_name is None:
            reason = "no_class"
        full = f"{container.path}/{member.name}"
        yield Input(
            f"{full} (byte {member.offset})" if is_repeated else full,
            container.split,
            container.class_name,
            stem_and_suffix(name)[0],
            member.num_bytes,
            reason,
            path,
            member.offset,
        )


def _normalized(name: str) -> str:
    """Remove `./`, `//`, and slashes at either end of a member's name."""
    if "./" not in name and "//" not in name and name[:1] != "/" and name[-1:] not in ("/", "."):
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _is_class_tar(member: Member, name: str) -> bool:
    return member.is_file and is_tar_name(name)


def _tars_in_folder(root: Path, place: SplitPlace) -> list[Container]:
    found, with_tars = [], None
    with os.scandir(root / place.path) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            path = os.path.join(place.path, entry.name)
            if entry.name.lower().endswith(COMPRESSED_SUFFIXES):
                raise compressed_tar_error(path, entry.name.rpartition(".")[2])
            if is_folder(entry):
                with_tars = with_tars or (entry.name if _has_tars(entry.path) else None)
            elif is_tar_name(entry.name) and entry.is_file():
                class_name = printable(stem_and_suffix(entry.name)[0])
                found.append(Container(path, place.split, class_name))
    if not found:
        hint = with_tars and f"its sub-folder {with_tars!r} does: name it in source.splits"
        raise UserError(
            f"{str(root / place.path)!r} contains no tar files",
            where=place.where,
            allowed="one tar of images per class",
            next_step=hint,
        )
    return found


def _has_tars(folder: str) -> bool:
    try:
        return any(map(is_tar_name, os.listdir(folder)))
    except OSError:
        return False


def _tars_in_tar(root: Path, place: SplitPlace) -> list[Container]:
    found: dict[str, Container] = {}
    try:
        with open(root / place.path, "rb") as file:
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
    if not found:
        what = f"{str(root / place.path)!r} contains no tar files"
        raise UserError(what, where=place.where, allowed="one tar of images per class")
    return list(found.values())
