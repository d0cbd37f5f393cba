from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources.parquet import ParquetImages
from tests.support.corpora.listing import MemorySpool, list_source
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import LabelSettings, SourceSettings

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def source(
    root: Path,
    *,
    values: Literal["name", "index", "none"] = "name",
    **options: Any,
) -> ParquetImages:
    labels = LabelSettings(values=values)
    return ParquetImages(SourceSettings(kind="parquet", path=str(root), **options), labels)


def write(
    path: Path, images: list[Any], labels: Any, *, names: list[str] | None = None, **options: Any
) -> None:
    table = pa.table(
        {"image": pa.array(images, IMAGE), "label": labels, "other": [0] * len(images)}
    )
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def test_rows_are_inputs_with_bytes_in_the_spool(tmp_path: Path) -> None:
    images = [{"bytes": b"one", "path": "n01_1.JPEG"}, {"bytes": b"three", "path": None}]
    images += [{"bytes": b"", "path": "sub/./x.y.png"}]
    write(tmp_path / "data/train-0.parquet", images, [1, 0, 1], names=["cat", "dog"])
    write(tmp_path / "data/test-0.parquet", images[:1], [0], names=["cat", "dog"])
    splits = {"train": "data/train-*.parquet", "test": "data/test-*.parquet"}
    listed, spool = source(tmp_path, splits=splits), MemorySpool()
    rows = list_source(listed, spool)
    assert [(row.path, row.split, row.name, row.class_name, row.reason) for row in rows] == [
        ("data/train-0.parquet/0", "train", "n01_1", "dog", None),
        ("data/train-0.parquet/1", "train", "train-0-1", "cat", None),
        ("data/train-0.parquet/2", "train", "sub/x.y", "dog", None),
        ("data/test-0.parquet/0", "test", "n01_1", "cat", None),
    ]
    data = [bytes(spool.data[row.offset :][: row.num_bytes]) for row in rows]
    assert data == [b"one", b"three", b"", b"one"] and all(row.spooled for row in rows)


@pytest.mark.parametrize(
    "labels, classes",
    [
        (pa.array(["a", " b ", "", None]), ["a", "b", None, None]),
        (pa.array([7, -1, None, 0], pa.int16()), ["7", None, None, "0"]),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), ["a", "b", "a", None]),
        (pa.array(["a", "x" * 5000, "c", "d"], pa.large_string()), ["a", None, "c", "d"]),
    ],
)
def test_labels_are_numbers_or_text(labels: Any, classes: list[str | None], tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"bytes": b"x", "path": None}] * 4, labels)
    rows = list_source(source(tmp_path / "a.parquet"))
    assert [row.class_name for row in rows] == classes
    assert [row.reason for row in rows] == [None if name else "no_label" for name in classes]


def test_metadata_names_the_classes_unless_values_are_index(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"bytes": b"x"}] * 4, [1, 2, -1, 0], names=["cat", "dog"])
    rows = list_source(source(tmp_path))
    assert [row.class_name for row in rows] == ["dog", None, None, "cat"]
    rows = list_source(source(tmp_path, values="index"))
    assert [row.class_name for row in rows] == ["1", "2", None, "0"]


def test_cells_without_bytes_have_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [None, {"path": "/etc/passwd"}, {"bytes": b"x"}], [0, 0, 0])
    rows = list_source(source(tmp_path))
    assert [row.reason for row in rows] == ["no_image", "no_image", None]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"image_column": "gone"}, "source.image_column.*no column 'gone'"),
        ({"label": "gone"}, "source.label.*no column 'gone'"),
        ({"image_column": "other"}, "source.image_column.*contains no bytes"),
        ({"label": "image"}, "source.label.*has type struct"),
    ],
)
def test_unusable_columns_are_refused(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", [{"bytes": b"x"}], [0])
    with pytest.raises(UserError, match=message):
        source(tmp_path, **options).containers()


def test_a_damaged_file_has_one_row(tmp_path: Path) -> None:
    rng = random.Random(0)
    images = [{"bytes": rng.randbytes(5000)} for _ in range(8)]
    file = tmp_path / "a.parquet"
    write(file, images, [0] * 8, row_group_size=2, compression="zstd", use_dictionary=False)
    whole = file.read_bytes()
    for cut in (0, 3, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        rows = list_source(source(tmp_path))
        assert [(row.path, row.reason) for row in rows] == [("a.parquet", "damaged_table")]
    chunk = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(1).column(0)
    broken = bytearray(whole)
    broken[chunk.data_page_offset :][:40] = b""
    start = chunk.data_page_offset
    broken[start : start + 60] = b"\xff" * 60
    file.write_bytes(broken)
    rows = list_source(source(tmp_path))
    assert [(row.path, row.reason) for row in rows if row.reason] == [
        ("a.parquet", "damaged_table")
    ]


def test_text_other_than_utf_8_is_a_missing_label(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    image = pa.StructArray.from_arrays([pa.array([b"x"]), bad], ["bytes", "path"])
    pq.write_table(pa.table({"image": image, "label": bad}), tmp_path / "a.parquet")
    (row,) = list_source(source(tmp_path))
    assert (row.name, row.reason) == ("a-0", "no_label")


@pytest.mark.parametrize("labels", [None, [None, None], [1.5, 2.5]])
def test_ignored_classes_need_no_label_column(labels: Any, tmp_path: Path) -> None:
    columns = {"image": pa.array([b"1", b"2"], pa.binary())}
    if labels is not None:
        columns["label"] = pa.array(labels, pa.float64())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = list_source(source(tmp_path, values="none"))
    assert [row.reason for row in rows] == [None, None] and all(row.spooled for row in rows)
