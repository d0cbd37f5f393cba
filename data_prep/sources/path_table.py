"""List a table of paths and labels: CSV, TSV or Parquet.

Owns: the columns, splitting large tables into parts, reading text tables in bounded memory, checks
on each path.
Leaves out: rows with equal paths, which the pipeline finds.

Paths are relative to the table's folder, or absolute. Paths and links that leave this folder are
rejected.
"""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from data_prep.sources.file_lists import FileList
from data_prep.sources.outages import printable, raise_if_outage
from data_prep.sources.parquet_rows import (
    TableDefect,
    column_type,
    opened_parquet,
    record_batches,
    value_of,
)
from data_prep.sources.paths import is_hidden, is_inside, opened, stat_listed, stem_and_suffix
from data_prep.sources.protocol import Container, Input, Spool, class_from_cell
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import (
    SPLIT_NAMES,
    LabelSettings,
    SourceSettings,
    can_name_split,
)

DELIMITERS = {"csv": ",", "tsv": "\t"}
SPLIT_COLUMN = "split"
# Tables without quotes are split at line ends; each part is a container.
PART_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
# (name of the row in the ledger, path, label, split or None)
Row = tuple[str, str | None, Any, str | None]


@dataclass(frozen=True, slots=True)
class PathTable:
    """Containers: every table, large ones in parts."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    has_label_values: ClassVar[bool] = True

    @property
    def root(self) -> Path:
        return self._files.root

    @property
    def _files(self) -> FileList:
        return FileList(self.settings, is_table_name, "tables (.csv, .tsv, .parquet)")

    def containers(self) -> list[Container]:
        """Raises UserError for missing tables and columns."""
        if not self.settings.splits and Path(self.settings.path).expanduser().is_dir():
            raise UserError(
                f"{self.settings.path!r} is not a table",
                where="source.path",
                allowed="a .csv, .tsv or .parquet file; or a folder, with a table per split in "
                "source.splits",
            )
        found: list[Container] = []
        for container in self._files.containers():
            if self._files.is_folder(container):
                found.append(container)
            elif _suffix(container.path) == "parquet":
                found += self._row_groups(container)
            else:
                found += self._line_ranges(container)
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Every row, with size and modification time of its file."""
        if self._files.is_folder(container):
            return
        table = container.file or container.path
        stat_listed(self.root, table)
        is_parquet = _suffix(table) == "parquet"
        rows = self._parquet_rows(container) if is_parquet else self._text_rows(container)
        files = _Files(self.root / os.path.dirname(table))
        try:
            for row in rows:
                yield self._input(container, row, files)
        except TableDefect:
            yield Input(container.path, container.split, None, "", 0, "damaged_table")
        except OSError as error:
            raise_if_outage(error, container.path)
            yield Input(container.path, container.split, None, "", 0, "unreadable")

    def _input(self, container: Container, row: Row, files: _Files) -> Input:
        row_name, path, label, split = row
        if split is not None and not can_name_split(split):
            raise UserError(
                f"{printable(row_name)}: {split!r} cannot name a split",
                where="source.path",
                allowed=SPLIT_NAMES,
            )
        class_name = class_from_cell(label, None, self.labels)
        num_bytes = modified_ns = 0
        reason: str | None = "unreadable"
        if path:
            path = files.relative(os.path.normpath(path))
            reason, num_bytes, modified_ns = files.check(path)
            path = os.path.join(os.path.dirname(container.file or container.path), path)
        if reason is None and class_name is None and self.labels.values != "none":
            reason = "no_label"
        return Input(
            path or row_name,
            split or container.split,
            class_name,
            stem_and_suffix(path)[0] if path else "",
            num_bytes,
            reason,
            modified_ns=modified_ns,
        )

    # Text tables

    def _line_ranges(self, container: Container) -> list[Container]:
        """The table; a large one in parts, unless quotes may hide line ends."""
        with opened(self.root, container.path) as fd:
            header, start = self._header(fd, container.path)
            size = os.fstat(fd).st_size
            if size - start <= PART_BYTES or has_quote(fd):
                return [container]
        found = []
        for begin in range(start, size, PART_BYTES):
            path = f"{container.path} (from byte {begin})"
            num_bytes = min(PART_BYTES, size - begin)
            found.append(Container(path, container.split, None, container.path, begin, num_bytes))
        return found

    def _header(self, fd: int, path: str) -> tuple[list[str], int]:
        """(column names, offset of the first row). Raises UserError for a missing column."""
        lines = Lines(fd, 0, os.fstat(fd).st_size, path)
        header = next(csv_rows(lines, delimiter=DELIMITERS[_suffix(path)]), [])
        header = [name.removeprefix("\ufeff").strip() for name in header]
        wanted = {"source.image_column": self.settings.image_column}
        if self.labels.values != "none":
            wanted["source.label"] = self.settings.label
        for key, name in wanted.items():
            if header.count(name) != 1:
                raise UserError(
                    f"{printable(path)!r} has {header.count(name) or 'no'} column {name!r} "
                    "in its first line",
                    where=key,
                    allowed=", ".join(map(repr, header[:20])),
                )
        return header, lines.position

    def _text_rows(self, container: Container) -> Iterator[Row]:
        """Rows that start in the container's part, which skips a line cut by its start."""
        path = container.file or container.path
        with opened(self.root, path) as fd:
            header, start = self._header(fd, path)
            size = os.fstat(fd).st_size
            stop = size
            if container.file:
                stop = container.offset + container.num_bytes
                start = next_line(fd, max(start, container.offset), first=start, path=path)
            image = header.index(self.settings.image_column)
            label = _column_index(header, self.settings.label)
            split = None if self.settings.splits else _column_index(header, SPLIT_COLUMN)
            lines = Lines(fd, start, size, path)
            rows = csv_rows(lines, delimiter=DELIMITERS[_suffix(path)])
            while lines.position < stop:
                row_name = f"{path} (byte {lines.position})"
                row = next(rows, None)
                if row is None:
                    return
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise UserError(
                        f"{printable(row_name)}: {len(row)} columns, "
                        f"{len(header)} in the first line",
                        where="source.path",
                    )
                yield (
                    row_name,
                    row[image],
                    None if label is None else row[label],
                    None if split is None else row[split].strip(),
                )

    # Parquet tables

    def _row_groups(self, container: Container) -> list[Container]:
        try:
            with opened_parquet(self.root, container.path) as table:
                self._columns(table, container.path)
                num_groups = table.metadata.num_row_groups
                if num_groups < 2:
                    return [container]
                return [
                    Container(
                        *(f"{container.path} (row group {group})", container.split, None),
                        *(container.path, _group_offset(table, group)),
                    )
                    for group in range(num_groups)
                ]
        except TableDefect:
            return [container]

    def _columns(self, table: Any, path: str) -> list[str]:
        columns = [self.settings.image_column]
        column_type(table, columns[0], path=path, key="source.image_column")
        if self.labels.values != "none":
            columns.append(self.settings.label)
            column_type(table, columns[1], path=path, key="source.label")
        if not self.settings.splits and SPLIT_COLUMN in table.schema_arrow.names:
            columns.append(SPLIT_COLUMN)
        return list(dict.fromkeys(columns))

    def _parquet_rows(self, container: Container) -> Iterator[Row]:
        path = container.file or container.path
        with opened_parquet(self.root, path) as table:
            columns = self._columns(table, path)
            row_number = 0
            for group in range(table.metadata.num_row_groups):
                if container.file and _group_offset(table, group) != container.offset:
                    row_number += table.metadata.row_group(group).num_rows
                    continue
                for batch in record_batches(table, group, columns=columns, path=path):
                    for i in range(batch.num_rows):
                        cells = {name: value_of(batch.column(name), i) for name in columns}
                        image, split = cells[columns[0]], cells.get(SPLIT_COLUMN)
                        yield (
                            f"{path}/{row_number}",
                            image if isinstance(image, str) else None,
                            cells.get(self.settings.label),
                            str(split or "") if SPLIT_COLUMN in columns else None,
                        )
                        row_number += 1


class _Files:
    """Checks on the paths of a table. Caches resolved folders."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.real_root = os.path.realpath(root)
        self._tops = [f"{top.rstrip('/')}/" for top in (os.path.abspath(root), self.real_root)]
        self._is_inside = lru_cache(maxsize=1024)(self._is_inside_root)

    def relative(self, path: str) -> str:
        """Make absolute paths in the table's folder relative to it; others stay unchanged."""
        for top in self._tops:
            if path.startswith(top):
                return path[len(top) :]
        return path

    def _is_inside_root(self, folder: str) -> bool:
        return is_inside(os.path.realpath(os.path.join(self.root, folder)), self.real_root)

    def check(self, path: str) -> tuple[str | None, int, int]:
        """(reason, bytes, modification time) of a normalized path."""
        folder = os.path.dirname(path)
        if path.startswith(("/", "../")) or path == "..":
            return "link_outside", 0, 0
        full = f"{self.root}/{path}"
        try:
            if not self._is_inside(folder):
                return "link_outside", 0, 0
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                if not is_inside(os.path.realpath(full), self.real_root):
                    return "link_outside", 0, 0
                status = os.stat(full)
        except (OSError, ValueError) as error:  # missing, not permitted, or an invalid name
            if isinstance(error, OSError):
                raise_if_outage(error, path)
            return "unreadable", 0, 0
        if not stat.S_ISREG(status.st_mode):
            return "not_a_file", 0, 0
        return None, status.st_size, status.st_mtime_ns


def is_table_name(name: str) -> bool:
    return _suffix(name) in (*DELIMITERS, "parquet") and not is_hidden(name)


def _suffix(name: str) -> str:
    return stem_and_suffix(name)[1].lower()


def _column_index(header: list[str], name: str) -> int | None:
    return header.index(name) if name in header else None


def _group_offset(table: Any, group: int) -> int:
    """Offset of the first column chunk of a row group."""
    chunk = table.metadata.row_group(group).column(0)
    return chunk.dictionary_page_offset or chunk.data_page_offset


class Lines:
    """Lines of a byte range of a file as text; `position` is the offset of the next one."""

    def __init__(self, fd: int, start: int, stop: int, path: str) -> None:
        self.fd, self.position, self.stop, self.path = fd, start, stop, path
        self.data, self.data_position = b"", 0

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        end = self.data.find(b"\n", self.data_position)
        while end < 0:
            rest = self.data[self.data_position :]
            start = self.position + len(rest)
            more = os.pread(self.fd, MAX_LINE_BYTES, start)[: max(0, self.stop - start)]
            self.data, self.data_position = rest + more, 0
            end = self.data.find(b"\n")
            if end < 0 and not more:
                if not rest:
                    raise StopIteration
                end = len(rest) - 1
            elif end < 0 and len(self.data) > MAX_LINE_BYTES:
                break
        if not 0 <= end - self.data_position < MAX_LINE_BYTES:
            raise UserError(
                f"{printable(self.path)!r} has a line of more than {MAX_LINE_BYTES:,} bytes",
                where="source.path",
            )
        line = self.data[self.data_position : end + 1]
        self.data_position = end + 1
        self.position += len(line)
        return line.decode("utf-8", "surrogateescape")


def csv_rows(lines: Lines, *, delimiter: str) -> Iterator[list[str]]:
    """Rows of the lines; an empty line is an empty row. Raises UserError for malformed quotes."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        offset = lines.position
        try:
            row = next(rows, None)
        except csv.Error as error:
            what = f"{printable(lines.path)!r} cannot be read at byte {offset}: {error}"
            raise UserError(what, where="source.path") from None
        if row is None:
            return
        yield row


def has_quote(fd: int) -> bool:
    """Whether the file contains quotes, so that cells may contain line ends."""
    position = 0
    while data := os.pread(fd, 1 << 20, position):
        if b'"' in data:
            return True
        position += len(data)
    return False


def next_line(fd: int, position: int, *, first: int, path: str) -> int:
    """Offset of the first line that starts at `position` or later; `first`: a known line start."""
    if position == first:
        return position
    lines = Lines(fd, position - 1, os.fstat(fd).st_size, path)
    next(lines, "")
    return lines.position
