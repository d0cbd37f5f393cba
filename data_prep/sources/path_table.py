"""List the images that a table of paths and labels names: CSV, TSV or Parquet, held in memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from data_prep.sources.files import file_containers, is_hidden, stem_and_suffix
from data_prep.sources.parquet import column_type, value_of
from data_prep.sources.protocol import (
    Container,
    Input,
    Source,
    class_from_cell,
    printable,
    raise_if_outage,
)
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import SPLIT_NAMES, can_name_split

DELIMITERS = {"csv": ",", "tsv": "\t"}
SPLIT_COLUMN = "split"
# Network file systems answer many requests at a time.
STAT_THREADS = 16
BATCH_ROWS = 4096


class PathTable(Source):
    """Containers: every table. Paths are relative to its folder, and may lead out of it."""

    def containers(self) -> list[Container]:
        """Raises UserError for missing tables."""
        if not self.settings.splits and Path(self.settings.path).expanduser().is_dir():
            raise UserError(
                f"{self.settings.path!r} is not a table",
                where="source.path",
                allowed="a .csv, .tsv or .parquet file; or a folder, with a table per split in "
                "source.splits",
            )
        return file_containers(self.settings, is_table_name, kind="tables (.csv, .tsv, .parquet)")

    def inputs(self, container: Container) -> Iterator[Input]:
        """Every row, with size and modification time of its file. Raises UserError."""
        try:
            table = self._read(container.path)
        except pa.ArrowInvalid as error:
            if container.path.endswith(".parquet"):
                raise
            what = f"{printable(container.path)!r} cannot be read: {error}"
            raise UserError(what, where="source.path") from None
        number = count()
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                rows = [
                    {name: _text(value_of(batch[name], i)) for name in batch.schema.names}
                    for i in range(len(batch))
                ]
                yield from pool.map(partial(self._input, container), rows, number)

    def _read(self, path: str) -> pa.Table:
        full = self.root / path
        if (suffix := _suffix(path)) == "parquet":
            schema = pq.read_schema(full)
        else:
            parsing = pa.csv.ParseOptions(
                delimiter=DELIMITERS[suffix], newlines_in_values=True, ignore_empty_lines=True
            )
            with pa.csv.open_csv(full, parse_options=parsing) as reader:
                # Text, so that 007 stays what it is; bytes, since file names may not be UTF-8.
                names = [name.strip() for name in reader.schema.names]
                schema = pa.schema([(name, pa.binary()) for name in names])
        keys = {"source.image_column": self.settings.image_column}
        if self.labels.values != "none":
            keys["source.label"] = self.settings.label
        for key, name in keys.items():
            column_type(schema, name, path=path, key=key)
        columns = list(dict.fromkeys(keys.values()))
        if not self.settings.splits and SPLIT_COLUMN in schema.names:
            columns.append(SPLIT_COLUMN)
        if suffix == "parquet":
            return pq.read_table(full, columns=columns)
        return pa.csv.read_csv(
            full,
            read_options=pa.csv.ReadOptions(column_names=names, skip_rows=1),
            parse_options=parsing,
            convert_options=pa.csv.ConvertOptions(column_types=schema, include_columns=columns),
        )

    def _input(self, container: Container, cells: dict[str, Any], row: int) -> Input:
        name, path = f"{container.path}/{row}", cells[self.settings.image_column]
        split = container.split
        if SPLIT_COLUMN in cells and not self.settings.splits:
            split = str(cells[SPLIT_COLUMN] or "").strip()
        if not can_name_split(split):
            raise UserError(
                f"{printable(name)}: {split!r} cannot name a split",
                where="source.path",
                allowed=SPLIT_NAMES,
            )
        class_name = class_from_cell(cells.get(self.settings.label), None, self.labels)
        item = Input(name, split, class_name, "", 0, "unreadable")
        if not isinstance(path, str) or not path or "\0" in path:
            return item
        item.path = os.path.join(os.path.dirname(container.path), os.path.normpath(path))
        item.name = stem_and_suffix(item.path)[0]
        try:
            status = os.stat(self.root / item.path)
        except OSError as error:
            raise_if_outage(error, item.path)
            return item
        item.num_bytes, item.modified_ns = status.st_size, status.st_mtime_ns
        item.reason = None if stat.S_ISREG(status.st_mode) else "not_a_file"
        if item.reason is None and class_name is None and self.labels.values != "none":
            item.reason = "no_label"
        return item


def is_table_name(name: str) -> bool:
    return _suffix(name) in (*DELIMITERS, "parquet") and not is_hidden(name)


def _suffix(name: str) -> str:
    return stem_and_suffix(name)[1].lower()


def _text(value: Any) -> Any:
    return os.fsdecode(value) if isinstance(value, bytes) else value
