"""Write predictions as one CSV or Parquet file: parts by rank, joined in the order of the images.

Owns: columns, parts, and the file that is whole or absent.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

from vitscale.distributed.atomic_files import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa

COPIED_ROWS = 65_536


class ImagePrediction(NamedTuple):
    """The prediction of one image."""

    image: str
    label: str | None
    """The true class, where it is known."""
    classes: tuple[str, ...]
    """The most probable first; empty for an unreadable image."""
    probabilities: tuple[float, ...]
    error: str | None
    """Why the image cannot be read."""


class Part(Protocol):
    """The rows of one rank, while they are written."""

    def write(self, rows: Sequence[ImagePrediction]) -> None: ...

    def close(self) -> None: ...


def open_part(folder: Path, kind: str, *, rank: int, top: int) -> Part:
    """kind: `.csv` or `.parquet`; top: classes of each image."""
    path = folder / f"{rank:05d}{kind}"
    return CsvPart(path, top=top) if kind == ".csv" else ParquetPart(path, top=top)


def join_parts(folder: Path, output: Path, *, top: int) -> None:
    """Write `output` from the parts of all ranks."""
    parts = sorted(folder.glob(f"*{output.suffix}"))
    with atomic_file(output) as file:
        (_join_csv if output.suffix == ".csv" else _join_parquet)(parts, file, top)


# ---- CSV ----------------------------------------------------------------------------------------


class CsvPart:
    """Rows without the line of names."""

    def __init__(self, path: Path, *, top: int) -> None:
        self._file = open(path, "w", newline="", encoding="utf-8")
        self._writer, self._top = csv.writer(self._file), top

    def write(self, rows: Sequence[ImagePrediction]) -> None:
        self._writer.writerows(_cells(row, self._top) for row in rows)

    def close(self) -> None:
        self._file.close()


def _cells(row: ImagePrediction, top: int) -> list[str]:
    pairs = zip(row.classes, row.probabilities, strict=True)
    ranked = [cell for name, share in pairs for cell in (name, f"{share:.6g}")]
    ranked += [""] * (2 * top - len(ranked))
    return [row.image, row.label or "", *ranked, row.error or ""]


def _join_csv(parts: Iterable[Path], file: IO[bytes], top: int) -> None:
    names = io.StringIO(newline="")
    csv.writer(names).writerow(column_names(top))
    file.write(names.getvalue().encode())
    for path in parts:
        with open(path, "rb") as part:
            shutil.copyfileobj(part, file)


def column_names(top: int) -> list[str]:
    ranked = [name for rank in range(1, top + 1) for name in (f"class_{rank}", f"p_{rank}")]
    return ["image", "label", *ranked, "error"]


# ---- Parquet ------------------------------------------------------------------------------------


class ParquetPart:
    def __init__(self, path: Path, *, top: int) -> None:
        import pyarrow.parquet as pq

        self._schema, self._top = _schema(top), top
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[ImagePrediction]) -> None:
        import pyarrow as pa

        columns: dict[str, list[str | float | None]] = {name: [] for name in self._schema.names}
        for row in rows:
            columns["image"].append(row.image)
            columns["label"].append(row.label)
            columns["error"].append(row.error)
            for rank in range(self._top):
                known = rank < len(row.classes)
                columns[f"class_{rank + 1}"].append(row.classes[rank] if known else None)
                columns[f"p_{rank + 1}"].append(row.probabilities[rank] if known else None)
        self._writer.write_table(pa.table(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _schema(top: int) -> pa.Schema:
    import pyarrow as pa

    kinds = {
        name: pa.float32() if name.startswith("p_") else pa.string() for name in column_names(top)
    }
    return pa.schema(list(kinds.items()))


def _join_parquet(parts: Iterable[Path], file: IO[bytes], top: int) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, _schema(top)) as writer:
        for path in parts:
            with pq.ParquetFile(path) as part:
                for batch in part.iter_batches(COPIED_ROWS):
                    writer.write_batch(batch)
