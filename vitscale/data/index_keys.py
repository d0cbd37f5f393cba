"""Read keys of an index: of a few samples for messages, of all to choose by a list of keys.

A few: only their row groups are read. All: as Arrow strings, about 30 bytes per sample while
choosing; as Python's they would take 2 GB for 14 million.
Leaves out: the columns that training needs (`index`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex, read_columns

KEY = "data.only_keys"


@dataclass(frozen=True, slots=True)
class ChosenByKey:
    """The samples of a split that a list of keys leaves."""

    index: SplitIndex
    sha256: str
    """Hash of the chosen rows of the stored split; the same for every file that lists them."""
    text: str
    """How many, for people."""


def choose_by_key(index: SplitIndex, path: str) -> ChosenByKey:
    """The samples of an index whose keys a text file lists, one per line.

    Raises UserError if the file cannot be read, or no sample has one of its keys.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        text = pa.array([Path(path).expanduser().read_text("utf-8")], pa.large_string())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error})",
            where=KEY,
            allowed="UTF-8 text with one key per line",
        ) from None
    lines = pc.split_pattern(text, "\n").flatten()
    wanted = pc.unique(lines.filter(pc.not_equal(lines, "")))
    assert index.index_path is not None
    keys = read_columns(index.index_path, index.split, ["key"]).column("key").cast(wanted.type)
    is_listed = pc.is_in(keys, value_set=wanted)
    stored = np.arange(len(keys)) if index.stored is None else index.stored
    rows = np.flatnonzero(is_listed.to_numpy()[stored])
    if not len(rows):
        raise UserError(
            f"none of the {index.num_samples:,} samples has one of the {len(wanted):,} keys of "
            f"{path}" + (f", such as {wanted[0].as_py()!r}" if len(wanted) else ""),
            where=KEY,
            allowed=f"keys of {index.split!r} of {index.folder}, such as {keys[0].as_py()!r}",
            next_step="correct the file",
        )
    digest = hashlib.sha256(stored[rows].astype("<i8").tobytes()).hexdigest()
    num_missing = len(wanted) - len(pc.unique(keys.filter(is_listed)))
    text = f"{len(rows):,} of {index.num_samples:,} samples by {len(wanted):,} keys"
    text += f"; {num_missing:,} keys are not in {index.split!r}" if num_missing else ""
    return ChosenByKey(index.subset(rows, name=f"keys {digest}"), digest, text)


def sample_keys(index: SplitIndex, samples: Sequence[int]) -> list[str]:
    """Keys of some samples of a split, in the order given.

    Decodes only their row groups, each of which has rows of one split.
    Raises UserError if the index cannot be read or lacks them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = index.index_path
    if path is None:
        raise UserError("has no keys", where=str(index.folder))
    rows = np.asarray(samples, np.int64)
    rows = rows if index.stored is None else index.stored[rows].astype(np.int64)
    found: dict[int, str] = {}
    try:
        with pq.ParquetFile(path) as file:
            split, start = file.schema_arrow.get_field_index("split"), 0
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if group.column(split).statistics.min != index.split:
                    continue
                here = np.unique(rows[(rows >= start) & (rows < start + group.num_rows)])
                if len(here):
                    keys = file.read_row_group(number, columns=["key"]).column(0).take(here - start)
                    found |= zip(here.tolist(), keys.to_pylist(), strict=True)
                start += group.num_rows
        return [found[row] for row in rows.tolist()]
    except (OSError, KeyError, AttributeError, pa.ArrowException) as error:
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
            found = [repr(key) for key in sample_keys(parts[part], numbers)]
        except UserError:
            found = [f"number {number} of {parts[part].split!r}" for number in numbers]
        names |= {(part, number): name for number, name in zip(numbers, found, strict=True)}
    return [names[sample] for sample in samples]
