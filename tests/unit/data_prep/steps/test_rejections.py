"""Counts of what is rejected: the early end of a rotten corpus, and why nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.formats.ledger import Outcomes, write_ledger
from data_prep.steps import write_shard
from tests.support.corpora.image_corpus import encoded
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError


def test_a_rotten_corpus_is_refused_before_all_of_it_is_read(tmp_path: Path) -> None:
    for i in range(40):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"rotten {i}".encode())
    sections = {"shards": {"min_shards": 8}, "images": {"max_bad_fraction": 0.2}}
    run = run_of(tmp_path / "images", tmp_path / "shards", **sections)
    work = prepare_here(run, until="write shards")
    units = write_shard.shard_units(work)
    write_shard.write_shard(work, units[0])
    write_shard.check_bad(work, units[:1])
    write_shard.write_shard(work, units[1])
    with pytest.raises(UserError, match="at least 10 of 40 images are bad.*\n.*10 not_an_image"):
        write_shard.check_bad(work, units[:2])


def gone(folder: Path) -> Path:
    (folder / "t.csv").write_text("image,label\n1.jpg,a\n2.jpg,a\n")
    return folder / "t.csv"


def listed_label(folder: Path) -> Path:
    (folder / "1.jpg").write_bytes(b"")
    pq.write_table(pa.table({"image": ["1.jpg"], "label": [["a"]]}), folder / "t.parquet")
    return folder / "t.parquet"


def truncated(folder: Path) -> Path:
    (folder / "t.parquet").write_bytes(b"PAR1 cut")
    return folder / "t.parquet"


def other_names(folder: Path) -> Path:
    (folder / "cat").mkdir()
    (folder / "cat" / "1.txt").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (gone, "path_table", "2 unreadable .*missing.*: '1.jpg', '2.jpg'"),
        (listed_label, "path_table", "1 no_label .sample without a usable label.: '1.jpg'"),
        (truncated, "path_table", "1 damaged_table .*: 't.parquet'"),
        (truncated, "parquet", "1 damaged_table .*: 't.parquet'"),
        (other_names, "image_folder", "1 other_name .*: 'cat/1.txt'"),
    ],
)
def test_when_every_input_is_rejected_the_error_says_why(
    make: Any, kind: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    run = run_of(make(tmp_path / "source"), tmp_path / "shards", source={"kind": kind})
    with pytest.raises(UserError, match=rf"all \d inputs are rejected\n  {message}\n  next:"):
        prepare_here(run)


def test_a_split_without_a_sound_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [encoded("PNG", seed=1)], "label": ["a"]})
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "val.parquet").write_bytes(b"PAR1 cut")
    splits = {"train": "train.parquet", "val": "val.parquet"}
    run = run_of(
        tmp_path,
        tmp_path / "shards",
        source={"kind": "parquet", "splits": splits},
        images={"max_bad_fraction": 1},
    )
    with pytest.raises(UserError, match="'val' has no usable image\n.*1 damaged_table") as error:
        prepare_here(run)
    assert "source.splits.val" in error.value.text()


def sums_of(folder: Path, reasons: list[str | None]) -> Outcomes:
    columns: dict[str, list[str | None]] = {
        "path": [f"{i}" for i in range(len(reasons))],
        "reason": reasons,
        **dict.fromkeys(("split", "class", "changes", "detail", "key"), [None] * len(reasons)),
    }
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    return write_ledger(
        folder, [pa.table(arrays | {"blake3": pa.nulls(len(reasons), pa.binary(32))})]
    )


def test_files_of_other_names_do_not_dilute_the_limit(tmp_path: Path) -> None:
    others = ["other_name", "hidden"] * 500
    ledger = sums_of(tmp_path, ["bad_pixels"] * 2 + [None] * 8 + others)
    ledger.check(max_bad_fraction=0.2)
    with pytest.raises(UserError, match="2 of 10 images are bad, more than the fraction 0.19"):
        ledger.check(max_bad_fraction=0.19)


def test_images_left_out_by_the_settings_are_not_bad(tmp_path: Path) -> None:
    ledger = sums_of(tmp_path, ["small_class", "left_out", None])
    ledger.check(max_bad_fraction=0.0)
