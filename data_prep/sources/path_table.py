"""List the images that a table of paths and labels names: CSV, TSV or Parquet, held in memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from data_prep.sources.errors import printable, raise_if_outage
from data_prep.sources.files import file_containers, is_hidden, stem_and_suffix
from data_prep.sources.parquet import value_of
from data_prep.sources.protocol import Container, Input, Source, Spool, class_from_cell
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

    def inputs(self, container: Container, *, spool: Spool) -> Iterator[Input]:
        """Every row, with size and modification time of its file. Raises UserError."""
        try:
            table = self._read(container.path)
        except pa.ArrowInvalid as error:
            if container.path.endswith(".parquet"):
                raise
            what = f"{printable(container.path)!r} cannot be read: {error}"
            raise UserError(what, where="source.path") from None
        folder, row = os.path.dirname(container.path), 0
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                cells = [self._cells(batch, i) for i in range(batch.num_rows)]
                paths = [path and os.path.join(folder, path) for path, _, _ in cells]
                facts = pool.map(self._facts, paths, chunksize=256)
                for path, fact, (_, label, split) in zip(paths, facts, cells, strict=True):
                    yield self._input(container, row, path, label, split, fact)
                    row += 1

    def _read(self, path: str) -> pa.Table:
        wanted = {"source.image_column": self.settings.image_column}
        if self.labels.values != "none":
            wanted["source.label"] = self.settings.label
        full = self.root / path
        if (suffix := _suffix(path)) == "parquet":
            names = pq.read_schema(full).names
        else:
            parsing = pa.csv.ParseOptions(
                delimiter=DELIMITERS[suffix], newlines_in_values=True, ignore_empty_lines=True
            )
            with pa.csv.open_csv(full, parse_options=parsing) as reader:
                names = [name.strip() for name in reader.schema.names]
        for key, name in wanted.items():
            if names.count(name) != 1:
                raise UserError(
                    f"{printable(path)!r} has {names.count(name) or 'no'} column {name!r}",
                    where=key,
                    allowed=", ".join(map(repr, names[:20])),
                )
        columns = list(dict.fromkeys(wanted.values()))
        if not self.settings.splits and SPLIT_COLUMN in names:
            columns.append(SPLIT_COLUMN)
        if suffix == "parquet":
            return pq.read_table(full, columns=columns)
        # Text, so that 007 stays what it is; bytes, since file names may not be UTF-8.
        types = {name: pa.binary() for name in names}
        return pa.csv.read_csv(
            full,
            read_options=pa.csv.ReadOptions(column_names=names, skip_rows=1),
            parse_options=parsing,
            convert_options=pa.csv.ConvertOptions(column_types=types, include_columns=columns),
        )

    def _cells(self, batch: Any, row: int) -> tuple[str | None, Any, str | None]:
        """(normalized path, label, split; None without such a column)."""
        cells = {name: _text(value_of(batch.column(name), row)) for name in batch.schema.names}
        path = cells[self.settings.image_column]
        split = cells.get(SPLIT_COLUMN, "") or "" if SPLIT_COLUMN in cells else None
        if self.settings.splits:
            split = None
        label = cells.get(self.settings.label)
        is_path = isinstance(path, str) and path and "\0" not in path
        return os.path.normpath(path) if is_path else None, label, split

    def _facts(self, path: str | None) -> tuple[str | None, int, int]:
        """(reason, bytes, modification time) of a file."""
        try:
            if path is not None:
                status = os.stat(self.root / path)
                reason = None if stat.S_ISREG(status.st_mode) else "not_a_file"
                return reason, status.st_size, status.st_mtime_ns
        except OSError as error:
            raise_if_outage(error, path or "")
        return "unreadable", 0, 0

    def _input(
        self,
        container: Container,
        row: int,
        path: str | None,
        label: Any,
        split: str | None,
        facts: tuple[str | None, int, int],
    ) -> Input:
        row_name = f"{container.path}/{row}"
        if split is not None and not can_name_split(str(split).strip()):
            raise UserError(
                f"{printable(row_name)}: {split!r} cannot name a split",
                where="source.path",
                allowed=SPLIT_NAMES,
            )
        class_name = class_from_cell(label, None, self.labels)
        reason, num_bytes, modified_ns = facts
        if reason is None and class_name is None and self.labels.values != "none":
            reason = "no_label"
        return Input(
            path or row_name,
            str(split).strip() if split is not None else container.split,
            class_name,
            stem_and_suffix(path)[0] if path else "",
            num_bytes,
            reason,
            modified_ns=modified_ns,
        )


def is_table_name(name: str) -> bool:
    return _suffix(name) in (*DELIMITERS, "parquet") and not is_hidden(name)


def _suffix(name: str) -> str:
    return stem_and_suffix(name)[1].lower()


def _text(value: Any) -> Any:
    return os.fsdecode(value) if isinstance(value, bytes) else value
