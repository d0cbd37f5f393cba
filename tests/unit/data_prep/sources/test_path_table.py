from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.path_table import PathTable
from tests.support.corpora.listing import list_source
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings


def source(
    path: Path,
    *,
    values: Literal["name", "none"] = "name",
    **options: Any,
) -> PathTable:
    settings = SourceSettings(kind="path_table", path=str(path), **options)
    return PathTable(settings, LabelSettings(values=values))


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=2)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
            writer.writerows([list(columns), *zip(*columns.values(), strict=True)])
    return path


@pytest.mark.parametrize("suffix", ["tsv", "parquet", "CSV"])
def test_rows_are_inputs_with_their_files(suffix: str, tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b,c.png", "3")
    columns = {
        "x": [1, 2, 3],
        "label": ["cat", "7", "dog"],
        "image": ["./a//1.jpg", "b,c.png", "3"],
    }
    table = write(tmp_path / "t.csv", columns).rename(tmp_path / f"t.{suffix}")
    if suffix in ("tsv", "parquet"):
        table.unlink()
        write(table, columns)
    listed = source(table)
    rows = list_source(listed)
    assert [(row.path, row.class_name, row.name, row.reason) for row in rows] == [
        ("a/1.jpg", "cat", "a/1", None),
        ("b,c.png", "7", "b,c", None),
        ("3", "dog", "3", None),
    ]
    assert [(row.num_bytes, row.modified_ns) for row in rows] == [
        (len(row.path), (tmp_path / row.path).stat().st_mtime_ns) for row in rows
    ]
    assert listed.root == tmp_path


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_a_path_leads_to_determines_the_reason(suffix: str, tmp_path: Path) -> None:
    touch(tmp_path, "out.jpg", "out/1.jpg", "in/1.jpg", "in/deep/2.jpg")
    for link, target in {
        "up": "..",
        "x.jpg": "../out.jpg",
        "y.jpg": "1.jpg",
        "z.jpg": "z.jpg",
    }.items():
        (tmp_path / "in" / link).symlink_to(target)
    os.mkfifo(tmp_path / "in/pipe.jpg")
    fates = {
        "1.jpg": None,
        "deep/2.jpg": None,
        "y.jpg": None,
        "../out.jpg": None,
        "..": "not_a_file",
        str(tmp_path / "in/1.jpg"): None,
        "up/out.jpg": None,
        "x.jpg": None,
        "gone.jpg": "unreadable",
        "1.jpg/2.jpg": "unreadable",
        "z.jpg": "unreadable",
        "n" * 300: "unreadable",
        "nul\0.jpg": "unreadable",
        "": "unreadable",
        ".": "not_a_file",
        "deep": "not_a_file",
        "pipe.jpg": "not_a_file",
    }
    table = write(tmp_path / f"in/t.{suffix}", {"image": list(fates), "label": ["a"] * len(fates)})
    assert [row.reason for row in list_source(source(table))] == list(fates.values())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_may_contain_the_split(suffix: str, tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    columns = {"image": ["1.jpg", "2.jpg"], "label": ["a", "a"], "split": ["train", "val"]}
    table = write(tmp_path / f"t.{suffix}", columns)
    assert [row.split for row in list_source(source(table))] == ["train", "val"]
    for wrong in ("", "a/b", "start", 25 * "a"):
        write(table, {**columns, "split": ["train", wrong]})
        with pytest.raises(UserError, match="cannot name a split"):
            list_source(source(table))


@pytest.mark.parametrize(
    "text, message",
    [
        ("image,other\n1,2\n", "source.label.*no column 'label'"),
        ("", "cannot be read: Empty CSV file"),
        ("image,label\n1\n", "cannot be read: .*Expected 2 columns, got 1"),
        ('image,label\n"' + "x\n" * 200_000, "cannot be read"),
    ],
)
def test_malformed_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        list_source(source(tmp_path / "t.csv"))


def test_sources_other_than_tables_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.parquet")
    for path, message in [("", "is not a table"), ("gone", "no such"), ("a.txt", "no tables")]:
        with pytest.raises(UserError, match=f"source.path.*{message}"):
            source(tmp_path / path).containers()
    (row,) = list_source(source(tmp_path / "b.parquet"))
    assert (row.path, row.reason) == ("b.parquet", "damaged_table")


def test_byte_order_marks_and_crlf_are_accepted(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg")
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfimage,label\r\n1.jpg,a\r\n\r\n1.jpg,b")
    assert [row.class_name for row in list_source(source(tmp_path / "t.csv"))] == ["a", "b"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("columns", [{}, {"label": [1.5, 2.5]}], ids=["missing", "unusable"])
def test_ignored_classes_need_no_label_column(
    columns: dict[str, list[Any]], suffix: str, tmp_path: Path
) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    table = write(tmp_path / f"t.{suffix}", {"image": ["1.jpg", "2.jpg"], **columns})
    rows = list_source(source(table, values="none"))
    assert {row.path: row.reason for row in rows} == {"1.jpg": None, "2.jpg": None}
