"""List Parquet files with image bytes and labels, the layout of Hugging Face data sets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.files import file_containers, is_hidden, stem_and_suffix
from data_prep.sources.protocol import Container, Input, Source, class_from_cell, printable
from vitscale.config.errors import UserError

BATCH_ROWS = 64
# Limits on an untrusted footer.
FOOTER_LIMITS = {"thrift_string_size_limit": 64 << 20, "thrift_container_size_limit": 10_000_000}


class ParquetImages(Source):
    """Containers: every file."""

    def containers(self) -> list[Container]:
        """Raises UserError for missing files, and for columns missing in the first file."""
        found = file_containers(self.settings, is_parquet_name, kind=".parquet files")
        for container in found:
            try:
                with pq.ParquetFile(self.root / container.path, **FOOTER_LIMITS) as table:
                    self._columns(table.schema_arrow, container.path)
                break
            except (pa.ArrowException, UnicodeDecodeError, OSError):
                continue  # it gets a row in the ledger
        return found

    def inputs(self, container: Container) -> Iterator[Input]:
        """Every row of a file, with its image's bytes."""
        path, number = container.path, count()
        with pq.ParquetFile(self.root / path, **FOOTER_LIMITS) as table:
            columns = self._columns(table.schema_arrow, path)
            names = None
            if self.labels.values != "index":
                names = class_label_names(table.schema_arrow, self.settings.label)
            for batch in table.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                image = batch.column(self.settings.image_column)
                cells = {"bytes": image}
                if pa.types.is_struct(image.type):
                    cells = dict(zip([f.name for f in image.type], image.flatten(), strict=True))
                if self.settings.label in batch.schema.names:
                    cells["label"] = batch.column(self.settings.label)
                for i in range(batch.num_rows):
                    row = {name: value_of(column, i) for name, column in cells.items()}
                    row["label"] = class_from_cell(row.get("label"), names, self.labels)
                    yield self._input(container, next(number), row)

    def _columns(self, schema: pa.Schema, path: str) -> list[str]:
        """Columns to read. Raises UserError for missing columns and wrong types."""
        image, label = self.settings.image_column, self.settings.label
        image_type = column_type(schema, image, path=path, key="source.image_column")
        columns = [image]
        if pa.types.is_struct(image_type):
            fields = {field.name: field.type for field in image_type}
            columns = [f"{image}.{name}" for name in ("bytes", "path") if name in fields]
            image_type = fields.get("bytes", pa.null())
        if not (pa.types.is_binary(image_type) or pa.types.is_large_binary(image_type)):
            raise UserError(
                f"column {image!r} of {printable(path)!r} contains no bytes",
                where="source.image_column",
                allowed="binary, or a struct of bytes and path",
            )
        if self.labels.values == "none":
            return columns
        label_type = column_type(schema, label, path=path, key="source.label")
        if pa.types.is_dictionary(label_type):
            label_type = label_type.value_type
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
        if not any(is_kind(label_type) for is_kind in kinds):
            raise UserError(
                f"column {label!r} of {printable(path)!r} has type {label_type}",
                where="source.label",
                allowed="a column of whole numbers or text",
            )
        return [*columns, label]

    def _input(self, container: Container, number: int, row: Mapping[str, Any]) -> Input:
        parts = [part for part in (row.get("path") or "").split("/") if part not in ("", ".")]
        name = stem_and_suffix("/".join(parts))[0]
        if not name.strip("./"):
            name = f"{stem_and_suffix(os.path.basename(container.path))[0]}-{number}"
        item = Input(f"{container.path}/{number}", container.split, row["label"], name, 0)
        item.file = container.path
        if row["bytes"] is None:
            item.reason = "no_image"
            return item
        item.num_bytes = len(row["bytes"])
        if row["label"] is None and self.labels.values != "none":
            item.reason = "no_label"
        else:
            item.data = row["bytes"]
        return item


def is_parquet_name(name: str) -> bool:
    return name.lower().endswith(".parquet") and not is_hidden(name)


def column_type(schema: pa.Schema, name: str, *, path: str, key: str) -> pa.DataType:
    """Return the type of a column. Raises UserError if it is missing."""
    if schema.names.count(name) != 1:
        raise UserError(
            f"{printable(path)!r} has no column {name!r}",
            where=key,
            allowed=", ".join(map(repr, schema.names[:20])),
        )
    return schema.field(name).type


def value_of(values: Any, row: int) -> Any:
    """A cell as a Python value; None for null and for text that is not UTF-8."""
    try:
        return values[row].as_py()
    except UnicodeDecodeError:
        return None


def class_label_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Class names by label from the metadata of the `datasets` package, or None."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        names = tuple(feature["names"]) if feature["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if names and all(isinstance(name, str) and name for name in names) else None
