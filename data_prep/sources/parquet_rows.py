"""Read the rows of a Parquet file in small batches and bounded memory.

Owns: opening untrusted files, the limit on column chunks, damaged row groups.
Leaves out: what the columns mean (`parquet_images`, `path_table`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.sources.outages import changed_source_error, printable, raise_if_outage
from vitscale.config.errors import UserError

BATCH_ROWS = 64
# A column chunk is read page by page, but may consist of a single page.
MAX_CHUNK_BYTES = 1 << 30
# Bytes of a batch, assuming rows of mean size.
MEAN_BATCH_BYTES = 16 << 20
# A dictionary value may repeat in every row of a batch.
MAX_BATCH_BYTES = 256 << 20
READ_BYTES = 1 << 20
MAX_FOOTER_STRING_BYTES, MAX_FOOTER_ITEMS = 64 << 20, 10_000_000


class TableDefect(ValueError):
    """The file, or one of its row groups, cannot be read."""


@contextmanager
def opened_parquet(root: Path, path: str) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile. Raises TableDefect, and OSError for unreadable files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        fd = os.open(root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise changed_source_error(path) from None
    with os.fdopen(fd, "rb"):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TableDefect("not a regular file")
        try:
            table = pq.ParquetFile(
                # Opened by Arrow: reading through a Python file would hold each page twice.
                pa.OSFile(f"/proc/self/fd/{fd}"),
                pre_buffer=False,
                buffer_size=READ_BYTES,
                thrift_string_size_limit=MAX_FOOTER_STRING_BYTES,
                thrift_container_size_limit=MAX_FOOTER_ITEMS,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _defect(error, path) from None
        yield table


def _defect(error: Exception, path: str) -> TableDefect:
    if isinstance(error, OSError):
        raise_if_outage(error, path)
    return TableDefect(str(error))


def column_type(table: Any, name: str, *, path: str, key: str) -> Any:
    """The type of a column. Raises UserError if it is missing."""
    if name not in table.schema_arrow.names:
        raise UserError(
            f"{printable(path)!r} has no column {name!r}",
            where=key,
            allowed=", ".join(map(repr, table.schema_arrow.names[:20])),
        )
    return table.schema_arrow.field(name).type


def record_batches(table: Any, group: int, *, columns: Sequence[str], path: str) -> Iterator[Any]:
    """Batches of one row group. Raises TableDefect, and UserError for a chunk above the limit."""
    import pyarrow as pa

    rows = BATCH_ROWS
    metadata = table.metadata.row_group(group)
    for i in range(metadata.num_columns):
        chunk = metadata.column(i)
        if not any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
            continue
        num_bytes = max(chunk.total_uncompressed_size, chunk.total_compressed_size)
        if num_bytes > MAX_CHUNK_BYTES:
            raise UserError(
                f"{printable(path)!r}: column {chunk.path_in_schema!r} of row group {group} takes "
                f"{num_bytes >> 20:,} MiB, more than {MAX_CHUNK_BYTES >> 20:,}",
                where="source.path",
                next_step="write the file with smaller row groups, such as 100 rows",
            )
        if chunk.has_dictionary_page:
            rows = min(rows, MAX_BATCH_BYTES // max(1, num_bytes))
        rows = min(rows, MEAN_BATCH_BYTES * metadata.num_rows // max(1, num_bytes))
    batches = table.iter_batches(
        batch_size=max(1, rows), row_groups=[group], columns=list(columns), use_threads=False
    )
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _defect(error, path) from None
        if batch is None:
            return
        yield batch


def value_of(values: Any, row: int) -> Any:
    """A cell as a Python value; None for null and for text that is not UTF-8."""
    try:
        return values[row].as_py()
    except UnicodeDecodeError:
        return None
