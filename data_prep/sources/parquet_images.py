"""List Parquet files with image bytes and labels, the layout of Hugging Face data sets.

Owns: the columns, class names in the file's metadata, names of rows.
Leaves out: reading in bounded memory (`parquet_rows`), listing the files (`file_lists`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
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
from data_prep.sources.paths import is_hidden, normalized_name, stat_listed, stem_and_suffix
from data_prep.sources.protocol import Container, Input, Spool, class_from_cell
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


@dataclass(frozen=True, slots=True)
class ParquetImages:
    """Containers: every file, and per split the folder of its files."""

    settings: SourceSettings
    labels: LabelSettings = LabelSettings()
    has_label_values: ClassVar[bool] = True

    @property
    def root(self) -> Path:
        return self._files.root

    @property
    def _files(self) -> FileList:
        return FileList(self.settings, is_parquet_name, ".parquet files")

    def containers(self) -> list[Container]:
        """Raises UserError(s) for missing files, and for columns missing in the first file."""
        found = self._files.containers()
        for container in found:
            if not self._files.is_folder(container):
                try:
                    with opened_parquet(self.root, container.path) as table:
                        self._columns(table, container.path)
                    break
                except (TableDefect, OSError):
                    continue  # `inputs` gives it a row in the ledger
        return found

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Every row of a file; image bytes are copied to the spool."""
        if self._files.is_folder(container):
            return self._files.other_files(container)
        return self._rows(container, spool)

    def _rows(self, container: Container, spool: Spool) -> Iterator[Input]:
        path = container.path
        status = stat_listed(self.root, path)
        damaged = Input(path, container.split, None, "", status.st_size, "damaged_table")
        damaged.modified_ns = status.st_mtime_ns
        try:
            with opened_parquet(self.root, path) as table:
                columns = self._columns(table, path)
                names = (
                    None
                    if self.labels.values == "index"
                    else class_label_names(table, self.settings.label)
                )
                row = 0
                for group in range(table.metadata.num_row_groups):
                    end = row + table.metadata.row_group(group).num_rows
                    try:
                        for batch in record_batches(table, group, columns=columns, path=path):
                            for cells in self._cells(batch):
                                yield self._input(container, row, cells, names, spool, status)
                                row += 1
                    except TableDefect:
                        yield _lost_rows(damaged, row, end)
                    row = end
        except TableDefect:
            yield damaged
        except OSError as error:
            raise_if_outage(error, path)
            damaged.reason = "unreadable"
            yield damaged

    def _columns(self, table: Any, path: str) -> list[str]:
        """Columns to read. Raises UserError for missing columns and wrong types."""
        import pyarrow.types as types

        image, label = self.settings.image_column, self.settings.label
        image_type = column_type(table, image, path=path, key="source.image_column")
        columns = [image]
        if types.is_struct(image_type):
            fields = {field.name: field.type for field in image_type}
            columns = [f"{image}.{name}" for name in ("bytes", "path") if name in fields]
            image_type = fields.get("bytes")
        if image_type is None or not (
            types.is_binary(image_type) or types.is_large_binary(image_type)
        ):
            raise UserError(
                f"column {image!r} of {printable(path)!r} contains no bytes",
                where="source.image_column",
                allowed="binary, or a struct of bytes and path",
            )
        if self.labels.values == "none":
            return columns
        label_type = column_type(table, label, path=path, key="source.label")
        if types.is_dictionary(label_type):
            label_type = label_type.value_type
        if not (
            types.is_integer(label_type)
            or types.is_string(label_type)
            or types.is_large_string(label_type)
        ):
            raise UserError(
                f"column {label!r} of {printable(path)!r} has type {label_type}",
                where="source.label",
                allowed="a column of whole numbers or text",
            )
        return [*columns, label]

    def _cells(self, batch: Any) -> Iterator[tuple[bytes | None, str | None, int | str | None]]:
        """(bytes, path, label) of each row."""
        image = batch.column(self.settings.image_column)
        paths = None
        if hasattr(image.type, "get_field_index") and image.type.num_fields:
            parts = dict(zip([f.name for f in image.type], image.flatten(), strict=True))
            image, paths = parts["bytes"], parts.get("path")
        has_label = self.settings.label in batch.schema.names
        labels = batch.column(self.settings.label) if has_label else None
        for i in range(batch.num_rows):
            yield (
                value_of(image, i),
                None if paths is None else value_of(paths, i),
                None if labels is None else value_of(labels, i),
            )

    def _input(
        self,
        container: Container,
        row: int,
        cells: tuple[bytes | None, str | None, int | str | None],
        names: tuple[str, ...] | None,
        spool: Spool,
        status: os.stat_result,
    ) -> Input:
        data, path, label = cells
        class_name = class_from_cell(label, names, self.labels)
        reason = None
        if data is None:
            reason = "no_image"
        elif class_name is None and self.labels.values != "none":
            reason = "no_label"
        file, offset = spool.add(data) if data is not None and reason is None else ("", 0)
        stem = stem_and_suffix(os.path.basename(container.path))[0]
        name = stem_and_suffix(normalized_name(path))[0] if path else ""
        return Input(
            f"{container.path}/{row}",
            container.split,
            class_name,
            name if name.strip("./") else f"{stem}-{row}",
            0 if data is None else len(data),
            reason,
            file or container.path,
            offset,
            status.st_mtime_ns,
            spooled=bool(file),
        )


def is_parquet_name(name: str) -> bool:
    return name.lower().endswith(".parquet") and not is_hidden(name)


def class_label_names(table: Any, column: str) -> tuple[str, ...] | None:
    """Class names by label from the metadata of the `datasets` package, or None."""
    metadata = table.schema_arrow.metadata or {}
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][column]
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return None
    return tuple(names)


def _lost_rows(damaged: Input, start: int, end: int) -> Input:
    """One row for the unreadable rest of a row group."""
    path = f"{damaged.path} (rows {start} to {end - 1})"
    return Input(path, damaged.split, None, "", 0, damaged.reason, modified_ns=damaged.modified_ns)
