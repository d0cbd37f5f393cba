"""Read the keys of a few samples from an index, for messages.

Reads only the row groups it needs: all keys of 14 million samples would take 2 GB.
Leaves out: the columns that training needs (`index`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, SplitIndex
from vitscale.data.remote.index import RangeFile
from vitscale.data.remote.urls import Url

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


def sample_keys(index: SplitIndex, samples: Sequence[int]) -> list[str]:
    """Keys of some samples of a split, in the order given.

    Requests and decodes only their row groups.
    Raises UserError if the index cannot be read or lacks them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = index.folder / INDEX_NAME
    rows = np.asarray(samples, np.int64)
    rows = rows if index.stored is None else index.stored[rows]
    try:
        source: Any = (
            RangeFile(path, remote_settings=index.remote_settings)
            if isinstance(path, Url)
            else path
        )
        with pq.ParquetFile(source) as file:
            found = _keys_of_rows(file, index.split, np.unique(rows))
        return [found[row] for row in rows.tolist()]
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserError(
            f"the keys of samples cannot be read ({error})",
            where=str(path),
            next_step="make the shards again",
        ) from None


def sample_names(parts: Sequence[SplitIndex], samples: Sequence[tuple[int, int]]) -> list[str]:
    """Quoted keys; or numbers if the keys cannot be read, which must not end a run.

    samples: (position in `parts`, sample).
    """
    names: dict[tuple[int, int], str] = {}
    for part in {part for part, _ in samples}:
        numbers = [number for of, number in samples if of == part]
        try:
            keys = [repr(key) for key in sample_keys(parts[part], numbers)]
        except UserError:
            keys = [f"number {number} of {parts[part].split!r}" for number in numbers]
        names |= {(part, number): key for number, key in zip(numbers, keys, strict=True)}
    return [names[sample] for sample in samples]


def _keys_of_rows(file: pq.ParquetFile, split: str, rows: np.ndarray) -> dict[int, str]:
    """Row in the split -> key. rows: int64, increasing. Missing rows are left out."""
    found: dict[int, str] = {}
    first = 0
    for group in range(file.num_row_groups):
        if len(found) == len(rows):
            break
        inside = _rows_of_split(file, group, split)
        here = rows[(rows >= first) & (rows < first + len(inside))]
        if len(here):
            keys = file.read_row_group(group, columns=["key"]).column(0).take(inside[here - first])
            found |= zip(here.tolist(), keys.to_pylist(), strict=True)
        first += len(inside)
    return found


def _rows_of_split(file: pq.ParquetFile, group: int, split: str) -> np.ndarray:
    """int64: rows of a row group that belong to a split; usually known from its statistics."""
    metadata = file.metadata.row_group(group)
    statistics = metadata.column(file.schema_arrow.get_field_index("split")).statistics
    if statistics is not None and statistics.has_min_max and statistics.min == statistics.max:
        return np.arange(metadata.num_rows if statistics.min == split else 0)
    column: pa.ChunkedArray = file.read_row_group(group, columns=["split"]).column(0)
    return np.flatnonzero([name == split for name in column.to_pylist()])
