"""List tars of one class each, in a folder or inside one large tar, such as ImageNet-21k.

Owns: which tars are classes, their members as inputs, members with equal names, damaged tars.
Leaves out: the tar format (`shards.tar_walk`), the walk through files beside the tars (`paths`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from data_prep.shards.tar_walk import CompressedTar, TarDefect, TarMember, walk_tar
from data_prep.sources.outages import printable, raise_if_outage
from data_prep.sources.paths import (
    SplitRoot,
    find_split_roots,
    is_hidden,
    is_image_name,
    is_tar_name,
    link_reason,
    normalized_name,
    opened,
    source_root,
    stat_listed,
    stem_and_suffix,
    walk_folder,
)
from data_prep.sources.protocol import Container, Input, Spool
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import LabelSettings, SourceSettings

COMPRESSED_SUFFIXES = {
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.xz": "xz",
    ".txz": "xz",
    ".tar.zst": "zstd",
    ".tar.bz2": "bzip2",
    ".tar.lz4": "lz4",
}


@dataclass(frozen=True, slots=True)
class ClassTars:
    """Containers: the tar of each class, and the other files in the same folder or tar."""

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
        for top in find_split_roots(self.settings, may_be_file=True):
            is_tar_of_tars = (self.root / top.path).is_file()
            try:
                tars = (_tars_in_tar if is_tar_of_tars else _tars_in_folder)(self.root, top)
            except UserError as error:
                errors.append(error)
                continue
            if not tars:
                errors.append(_no_tars_error(self.root, top))
            found.append(Container(top.path or ".", top.split))
            found += sorted(tars, key=lambda tar: os.fsencode(tar.path))
        if errors:
            raise UserErrors(errors)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Members of a tar; or the files beside tars, and a row for a damaged tar of tars."""
        if container.class_name is not None:
            rows = _class_inputs(self.root, container)
            return _named_by_tar(rows) if self.labels.values == "none" else rows
        if (self.root / container.path).is_file():
            return _other_members(self.root, container)
        return _files_beside_tars(self.root, container)


def _named_by_tar(rows: Iterator[Input]) -> Iterator[Input]:
    """Put the tar into the names of its images: without classes, nothing else tells them apart."""
    for row in rows:
        row.name = f"{row.class_name}/{row.name}"
        yield row


def compressed_tar_error(path: str, method: str) -> UserError:
    unpacker = {"gzip": "gunzip", "xz": "unxz", "zstd": "unzstd", "bzip2": "bunzip2"}
    return UserError(
        f"{printable(path)!r} is compressed with {method}: its images cannot be read one by one",
        where="source.path",
        allowed="plain tar files",
        next_step=f"uncompress it first ({unpacker.get(method, method)}); its size hardly changes",
    )


def named_members(
    members: Iterator[TarMember],
) -> Iterator[tuple[TarMember, str, int | None]]:
    """Members except folders: (member, normalized name, offset of an earlier one of that name)."""
    offsets: dict[int, int] = {}
    for member in members:
        if member.kind == "folder":
            continue
        name = normalized_name(member.name)
        first = offsets.setdefault(hash(name), member.offset)
        yield member, name, None if first == member.offset else first


def member_path(container: Container, member: TarMember, first: int | None) -> str:
    """The member's name in the ledger; a repeated name gets the offsets of both members."""
    path = f"{container.path}/{member.name}"
    return path if first is None else f"{path} (bytes {first} and {member.offset})"


def member_reason(member: TarMember, name: str, first: int | None) -> str | None:
    """Why the type or name of a member rejects it."""
    if member.kind != "file":
        return "not_a_file"
    if is_hidden(name):
        return "hidden"
    if not is_image_name(name):
        return "other_name"
    return None if first is None else "duplicate_name"


def tar_row(container: Container, reason: str, *, num_bytes: int, modified_ns: int) -> Input:
    """The row of a damaged or unreadable tar; members before the damage have rows too."""
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


def _class_inputs(root: Path, container: Container) -> Iterator[Input]:
    path = container.file or container.path
    status = stat_listed(root, path)
    num_bytes = container.num_bytes if container.file else status.st_size
    reason = "truncated_tar"
    try:
        with opened(root, path) as fd:
            walk = walk_tar(fd, start=container.offset, end=container.offset + num_bytes)
            for member, name, first in named_members(walk):
                yield Input(
                    member_path(container, member, first),
                    container.split,
                    container.class_name,
                    stem_and_suffix(name)[0],
                    member.num_bytes,
                    member_reason(member, name, first),
                    path,
                    member.offset,
                    status.st_mtime_ns,
                )
            return
    except CompressedTar as defect:
        raise compressed_tar_error(container.path, defect.method) from None
    except TarDefect:
        pass
    except OSError as error:
        raise_if_outage(error, path)
        reason = "unreadable"
    yield tar_row(container, reason, num_bytes=num_bytes, modified_ns=status.st_mtime_ns)


def _is_tar_file(entry: os.DirEntry[str]) -> bool:
    return is_tar_name(entry.name) and entry.is_file()


def _tars_in_folder(root: Path, top: SplitRoot) -> list[Container]:
    real_root, real_top = os.path.realpath(root), os.path.realpath(root / top.path)
    found, compressed = [], []
    with os.scandir(root / top.path) as entries:
        for entry in entries:
            if entry.name.lower().endswith(tuple(COMPRESSED_SUFFIXES)) and not is_hidden(
                entry.name
            ):
                compressed.append(entry.name)
            elif _is_tar_file(entry) and not (
                entry.is_symlink()
                and link_reason(entry.path, real_root=real_root, real_folders=[real_top])
            ):
                class_name = printable(stem_and_suffix(entry.name)[0])
                path = os.path.join(top.path, entry.name)
                found.append(Container(path, top.split, class_name))
    if compressed:
        name = min(compressed)
        method = next(m for end, m in COMPRESSED_SUFFIXES.items() if name.lower().endswith(end))
        raise compressed_tar_error(os.path.join(top.path, name), method)
    return found


def _files_beside_tars(root: Path, container: Container) -> Iterator[Input]:
    """Files that are not class tars. Tars in sub-folders are rejected: they have no class."""
    for row in walk_folder(root, container, is_container=_is_tar_file):
        if row.reason == "other_name" and is_tar_name(row.path):
            row = replace(row, reason="no_class")
        yield row


def _outer_members(root: Path, path: str) -> Iterator[tuple[TarMember, str, int | None]]:
    with opened(root, path) as fd:
        yield from named_members(walk_tar(fd, end=os.fstat(fd).st_size))


def _is_class_tar(member: TarMember, name: str, first: int | None) -> bool:
    return member.kind == "file" and first is None and is_tar_name(name)


def _tars_in_tar(root: Path, top: SplitRoot) -> list[Container]:
    found = []
    try:
        for member, name, first in _outer_members(root, top.path):
            if _is_class_tar(member, name, first):
                class_name = printable(stem_and_suffix(os.path.basename(name))[0])
                path = f"{top.path}/{member.name}"
                found.append(
                    Container(
                        *(path, top.split, class_name),
                        *(top.path, member.offset, member.num_bytes),
                    )
                )
    except CompressedTar as defect:
        raise compressed_tar_error(top.path, defect.method) from None
    except (TarDefect, OSError) as defect:
        if isinstance(defect, OSError):
            raise_if_outage(defect, top.path)
        if not found or isinstance(defect, OSError):
            what = f"{printable(top.path)!r} cannot be read as a tar file ({defect})"
            raise UserError(what, where=top.where) from None
    return found


def _other_members(root: Path, container: Container) -> Iterator[Input]:
    """Members of a tar of tars that are not tars, and a row for the outer tar if damaged."""
    status = stat_listed(root, container.path)
    try:
        for member, name, first in _outer_members(root, container.path):
            if _is_class_tar(member, name, first):
                continue
            reason = member_reason(member, name, first)
            if member.kind == "file" and is_tar_name(name):
                reason = "duplicate_name"
            yield Input(
                member_path(container, member, first),
                container.split,
                None,
                stem_and_suffix(name)[0],
                member.num_bytes,
                reason or "no_class",
                container.path,
                member.offset,
                status.st_mtime_ns,
            )
    except TarDefect:
        num_bytes, modified_ns = status.st_size, status.st_mtime_ns
        yield tar_row(container, "truncated_tar", num_bytes=num_bytes, modified_ns=modified_ns)


def _no_tars_error(root: Path, top: SplitRoot) -> UserError:
    path = root / top.path
    what = f"{str(path)!r} contains no tar files"
    if path.is_dir():
        with os.scandir(path) as entries:
            for entry in islice(entries, 100):
                if entry.is_dir() and any(map(is_tar_name, os.listdir(entry.path))):
                    hint = (
                        f"its sub-folder {printable(entry.name)!r} does: name it in source.splits"
                    )
                    return UserError(what, where=top.where, next_step=hint)
    return UserError(what, where=top.where, allowed="one tar of images per class")
