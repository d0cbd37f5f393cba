"""List the images of tables: bytes in Parquet files, or files that a CSV, TSV or Parquet names."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from data_prep.sources.files import file_containers, member_path, stem_and_suffix
from data_prep.sources.protocol import (
    Container,
    Input,
    Source,
    class_from_cell,
    printable,
    raise_if_outage,
)
from vitscale.config.errors import UserError
from vitscale.config.packed_files import MAX_EXPANSION, check_expansion
from vitscale.data.split_names import SPLIT_OF_NAME
from vitscale.runs.data_prep import SPLIT_NAMES, can_name_split

# Rows that are read at a time: so many, or fewer, so that they cannot exceed so many bytes.
PATH_ROWS = 4096
CELL_BYTES = 256 << 20
# Paths and labels repeat, and are packed much better than images.
TEXT_EXPANSION = 1000
DELIMITERS = {"csv": ",", "tsv": "\t"}
SPLIT_COLUMN = "split"
# Network file systems answer many requests at a time.
STAT_THREADS = 16


class ParquetImages(Source):
    """Containers: every file with image bytes and labels, as in Hugging Face data sets."""

    def containers(self) -> list[Container]:
        found = file_containers(self.settings, _is_parquet, kind=".parquet files")
        if self.labels.values == "name":
            self._check_names(found)
        return found

    def _check_names(self, containers: Sequence[Container]) -> None:
        """Raise UserError for files that name the classes of their numbers in different ways."""
        first: dict[tuple[str, ...] | None, str] = {}
        for box in containers:
            with suppress(
                pa.ArrowException, OSError
            ):  # a damaged table is a row of the ledger
                schema = pq.read_schema(self.root / box.path)
                first.setdefault(
                    class_label_names(schema, self.settings.label), box.path
                )

        if len(first) > 1:
            one, other = (f"{printable(path)!r}" for path in list(first.values())[:2])
            raise UserError(
                f"{one} and {other} have different lists of class names, or one of them none",
                where="source.path",
                next_step="write these files alike; or set labels.values=index and labels.space",
            )

    def inputs(self, container: Container) -> Iterator[Input]:
        number = count()
        label = self.settings.label
        names = None
        with pq.ParquetFile(self.root / container.path) as table:
            columns = self._columns(table.schema_arrow, container.path)
            if self.labels.values != "index":
                names = class_label_names(table.schema_arrow, label)
            if SPLIT_COLUMN in table.schema_arrow.names and not self.settings.splits:
                columns.append(SPLIT_COLUMN)
            # A table of images may be larger than memory, so it is read in batches.
            for batch in _batches(table, columns, path=self.root / container.path):
                for row in batch.to_pylist():
                    image = row[self.settings.image_column]
                    image = image if isinstance(image, dict) else {"bytes": image}
                    class_name = class_from_cell(row.get(label), self.labels, names)
                    item = self._input(container, next(number), image, class_name)
                    item.split = _split_of(row, container, row=item.path)
                    yield item

    def _columns(self, schema: pa.Schema, path: str) -> list[str]:
        """Columns to read. Raises UserError for missing columns and wrong types."""
        image = self.settings.image_column
        label = self.settings.label
        image_type = column_type(schema, image, path=path, key="source.image_column")
        columns = [image]

        if pa.types.is_struct(image_type):
            fields = {field.name: field.type for field in image_type}
            columns = [
                f"{image}.{name}" for name in ("bytes", "path") if name in fields
            ]
            # A struct without bytes has only paths, which are of another machine.
            image_type = fields.get("bytes", pa.null())
        if image_type not in (pa.binary(), pa.large_binary()):
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
        is_text = label_type in (pa.string(), pa.large_string())
        if not is_text and not pa.types.is_integer(label_type):
            raise UserError(
                f"column {label!r} of {printable(path)!r} has type {label_type}",
                where="source.label",
                allowed="a column of whole numbers or text",
            )
        return [*columns, label]

    def _input(
        self,
        container: Container,
        number: int,
        image: Mapping[str, Any],
        class_name: str | None,
    ) -> Input:
        # The path inside the table tells images apart if it has one; else the row does.
        name = stem_and_suffix(member_path(image.get("path") or ""))[0]
        if not name.strip("./"):
            name = f"{stem_and_suffix(os.path.basename(container.path))[0]}-{number}"

        data = image.get("bytes")
        item = Input(
            f"{container.path}/{number}",
            container.split,
            class_name,
            name,
            len(data or b""),
            file=container.path,
            data=data,
        )
        if data is None:
            item.reason = "no_image"
        return self.labelled(item)


class PathTable(Source):
    """Containers: every table. Paths are relative to its folder, and may lead out of it."""

    def containers(self) -> list[Container]:
        # A folder may have tables of other things, so each must be named.
        if not self.settings.splits and Path(self.settings.path).is_dir():
            raise UserError(
                f"{self.settings.path!r} is not a table",
                where="source.path",
                allowed="a .csv, .tsv or .parquet file; or a folder, with a table per split in "
                "source.splits",
            )
        return file_containers(
            self.settings, _is_table, kind="tables (.csv, .tsv, .parquet)"
        )

    def inputs(self, container: Container) -> Iterator[Input]:
        try:
            table = self._read(container.path)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            if _is_parquet(container.path):
                raise
            raise UserError(
                f"{printable(container.path)!r} cannot be read: {error}",
                where="source.path",
                allowed="a table in UTF-8",
            ) from None

        number = count()
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            for batch in table.to_batches(max_chunksize=PATH_ROWS):
                yield from pool.map(
                    partial(self._input, container), batch.to_pylist(), number
                )

    def _read(self, path: str) -> pa.Table:
        """The columns needed, of the whole table."""
        full = self.root / path
        keys = {"source.image_column": self.settings.image_column}
        if self.labels.values != "none":
            keys["source.label"] = self.settings.label
        # A dictionary keeps the order, and one column may serve twice.
        columns = dict.fromkeys(keys.values())
        if _is_parquet(path):
            with pq.ParquetFile(full) as file:
                schema = file.schema_arrow
                wanted = [
                    name for name in (*columns, SPLIT_COLUMN) if name in schema.names
                ]
                batches = _batches(file, wanted, path=full, times=TEXT_EXPANSION)
                types = pa.schema([schema.field(name) for name in wanted])
                table = pa.Table.from_batches(batches, types)
        else:
            # Text, so that 007 stays what it is; bytes, since file names may not be UTF-8.
            types = dict.fromkeys((*columns, SPLIT_COLUMN), pa.binary())
            with open(full, "rb") as file:
                header = file.readline()
            # UTF-16 has a NUL beside each letter.
            if b"\0" in header:
                raise pa.ArrowInvalid("it is UTF-16, or has NUL bytes")
            delimiter = DELIMITERS[_suffix(path)]
            if b";" in header and delimiter.encode() not in header:
                # Excel writes .csv so where a comma is the decimal point.
                delimiter = ";"
            parsing = pa.csv.ParseOptions(delimiter=delimiter)
            # Cells in quotes may have line ends.
            parsing.newlines_in_values = True
            converting = pa.csv.ConvertOptions(column_types=types)
            table = pa.csv.read_csv(
                full, parse_options=parsing, convert_options=converting
            )
            _refuse_swallowed_rows(table, delimiter)

        # Only columns that are there can be chosen; a column of splits need not be.
        for key, name in keys.items():
            column_type(table.schema, name, path=path, key=key)
        if not self.settings.splits and SPLIT_COLUMN in table.column_names:
            columns[SPLIT_COLUMN] = None
        return table.select(list(columns))

    def _input(self, container: Container, values: dict[str, Any], row: int) -> Input:
        name = f"{container.path}/{row}"
        path = values.pop(self.settings.image_column)
        if isinstance(path, bytes):  # file names need not be UTF-8
            path = os.fsdecode(path)

        cells = {
            column: _text(value, column, row=name) for column, value in values.items()
        }
        split = _split_of(cells, container, row=name)
        class_name = class_from_cell(cells.get(self.settings.label), self.labels)
        # Unusable until its file has been found.
        item = Input(name, split, class_name, "", 0, "unreadable")
        if not isinstance(path, str) or not path or "\0" in path:
            return item
        item.path = os.path.join(
            os.path.dirname(container.path), os.path.normpath(path)
        )
        item.name = stem_and_suffix(item.path)[0]
        try:
            status = os.stat(self.root / item.path)
        except OSError as error:
            raise_if_outage(error, item.path)
            return item

        item.set_status(status)
        item.reason = None if stat.S_ISREG(status.st_mode) else "not_a_file"
        return self.labelled(item)


def _batches(
    table: pq.ParquetFile,
    columns: Sequence[str],
    *,
    path: Path,
    times: int = MAX_EXPANSION,
) -> Iterator[pa.RecordBatch]:
    """Yield rows, at most about CELL_BYTES of them at a time.

    Raises UserError if the columns unpack to far more than the file: by what it says of them, and
    as they are read, since a dictionary can repeat a cell without end.
    """
    where = repr(printable(path))
    check = partial(check_expansion, file_bytes=path.stat().st_size, where=where)
    # Columns of a struct are named IMAGE.bytes.
    prefixes = tuple(f"{column}." for column in columns)
    sizes = [0]
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        parts = [group.column(column) for column in range(group.num_columns)]
        wanted = [
            part for part in parts if f"{part.path_in_schema}.".startswith(prefixes)
        ]
        sizes.append(sum(part.total_uncompressed_size for part in wanted))
    check(sum(sizes), times=times)

    # Even if each row were as large as the largest group, this many would fit.
    num_rows = min(PATH_ROWS, max(1, CELL_BYTES // max(1, *sizes)))
    num_bytes = 0
    for number in range(table.num_row_groups):
        # One group at a time: a reader of several keeps the bytes of all that it has read.
        for batch in table.iter_batches(
            num_rows, row_groups=[number], columns=columns, use_threads=False
        ):
            num_bytes += batch.nbytes
            check(num_bytes, times=times)
            yield batch


def _text(cell: object, column: str, *, row: str) -> object:
    """The text of a cell. Raises UserError if it is not UTF-8."""
    if not isinstance(cell, bytes):
        return cell
    try:
        return cell.decode()
    except UnicodeDecodeError:
        raise UserError(
            f"{printable(row)}: column {column!r} is not UTF-8: {printable(cell)!r}",
            where="source.path",
            next_step='save the table as UTF-8; in Excel as "CSV UTF-8"',
        ) from None


def _refuse_swallowed_rows(table: pa.Table, delimiter: str) -> None:
    """Raise ArrowInvalid for a cell with a line's end and a delimiter."""
    # A quote that is not closed swallows rows up to the next one.
    both = rf"(?s)[\r\n].*{delimiter}|{delimiter}.*[\r\n]"
    for column in table.columns:
        if column.type in (pa.string(), pa.binary()):
            row = pc.index(pc.match_substring_regex(column, both), value=True).as_py()
            if row >= 0:
                raise pa.ArrowInvalid(
                    f"line {row + 2}: a quote that is not closed there"
                )


def _split_of(cells: Mapping[str, object], container: Container, *, row: str) -> str:
    """The split that a row names: a keyword, or one of its own. Raises UserError."""
    if SPLIT_COLUMN not in cells:
        return container.split
    split = str(cells[SPLIT_COLUMN] or "").strip()
    # A keyword such as `validation` means the split `val`.
    split = SPLIT_OF_NAME.get(split.lower(), split)
    if not can_name_split(split):
        raise UserError(
            f"{printable(row)}: {split!r} cannot name a split",
            where="source.path",
            allowed=SPLIT_NAMES,
        )
    return split


def _is_parquet(name: str) -> bool:
    return _suffix(name) == "parquet"


def _is_table(name: str) -> bool:
    return _suffix(name) in (*DELIMITERS, "parquet")


def _suffix(name: str) -> str:
    return stem_and_suffix(name)[1].lower()


def column_type(schema: pa.Schema, name: str, *, path: str, key: str) -> pa.DataType:
    """Return the type of a column. Raises UserError if it is missing."""
    # Two columns of one name cannot be told apart.
    if schema.names.count(name) != 1:
        raise UserError(
            f"{printable(path)!r} has no column {name!r}",
            where=key,
            allowed=", ".join(map(repr, schema.names[:20])),
        )
    return schema.field(name).type


def class_label_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """Class names by label from the metadata of the `datasets` package, or None."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][
            column
        ]
        names = tuple(feature["names"]) if feature["_type"] == "ClassLabel" else ()
        "".join(names).encode()  # fails for other values, and lone surrogates of JSON
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if names and all(names):
        return names
    return None
