"""Tables hold the rows of all ranks in order, whatever their text."""

from __future__ import annotations

import csv
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from finetune.inference.prediction.tables import (
    ImagePrediction,
    column_names,
    join_parts,
    open_part,
)

ROWS = [
    ImagePrediction('a "b",\nc.jpg', "cat", ("cat", "döner"), (0.75, 0.25), None),
    ImagePrediction("d.jpg", None, (), (), "is not a file"),
    ImagePrediction("e.jpg", "", ("döner", "cat"), (0.5, 0.5), None),
]


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_parts_are_joined_in_the_order_of_ranks(tmp_path: Path, kind: str) -> None:
    for rank, rows in ((1, ROWS[2:]), (0, ROWS[:2]), (2, [])):
        with closing(open_part(tmp_path, kind, rank=rank, top=2)) as part:
            part.write(rows)
    (tmp_path / "out").mkdir()
    output = tmp_path / f"out/table{kind}"
    join_parts(tmp_path, output, top=2)
    if kind == ".csv":
        with open(output, newline="") as file:
            found = list(csv.DictReader(file))
    else:
        found = pq.read_table(output).to_pylist()
    assert list(found[0]) == column_names(2)
    assert [row["image"] for row in found] == [row.image for row in ROWS]
    assert [row["class_1"] or None for row in found] == ["cat", None, "döner"]
    assert [float(row["p_2"] or 0) for row in found] == [0.25, 0.0, 0.5]
    assert [row["error"] or None for row in found] == [None, "is not a file", None]
    assert [path.name for path in output.parent.iterdir()] == [output.name]
