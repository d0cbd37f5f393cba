"""Counts of what is rejected: the early end of a rotten corpus, and why nothing is left."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.pipeline import row_tables
from data_prep.pipeline.rejections import Rejections, check_so_far
from tests.support.corpora.image_corpus import corpus, encoded
from tests.support.corpora.preparing import preparation, prepare_here, run_of
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest


def rotten(root: Path, *, num: int) -> Path:
    for i in range(num):
        path = root / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"rotten {i}".encode())
    return root


@pytest.mark.parametrize(
    "unit, selection", [("shard", {}), ("survey", {"min_images_per_class": 1})]
)
def test_a_bad_corpus_stops_once_all_units_exceed_the_limit(
    unit: str, selection: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tables, "BUCKET_ROWS", 10)
    run = run_of(
        rotten(tmp_path / "images", num=200),
        tmp_path / "shards",
        shards={"min_shards": 40},
        selection=selection,
        images={"max_bad_fraction": 0.2},
    )
    with pytest.raises(UserError, match="of 200 images are bad, more than the fraction 0.2"):
        prepare_here(run)
    done = len(list(preparation(run).path("results").glob(f"{unit}-*")))
    # No unit alone holds a fifth of the images.
    assert 3 <= done <= 15
    with pytest.raises(UserError, match="at least .* of 200 images are bad"):
        prepare_here(run)


@pytest.mark.parametrize("num_bad, is_allowed", [(4, True), (5, False)])
def test_the_early_check_and_the_ledger_agree(
    num_bad: int, is_allowed: bool, tmp_path: Path
) -> None:
    root = corpus(tmp_path / "images", num=20)
    for i in range(3):
        (root / "cat" / f"00{i}.{['jpg', 'png', 'webp'][i]}").write_bytes(b"rotten")
    for i in range(num_bad - 3):
        (root / "dog" / f"broken{i}.jpg").symlink_to("nowhere")
    for i in range(100):  # count neither as bad nor as images
        (root / "cat" / f"{i}.txt").write_bytes(b"")
    run = run_of(
        root, tmp_path / "shards", shards={"min_shards": 10}, images={"max_bad_fraction": 0.1}
    )
    if is_allowed:
        prepare_here(run)
        assert read_manifest(tmp_path / "shards").inputs["num_kept"] == 37
        return
    with pytest.raises(UserError) as refused:
        prepare_here(run)
    assert "5 of 42 images are bad" in refused.value.text()
    assert "2 link_broken (link to nothing): 'dog/broken0.jpg'" in refused.value.text()
    assert not preparation(run).has_result("ledger")


def test_files_that_are_no_images_do_not_delay_the_end(tmp_path: Path) -> None:
    inputs = {"num_inputs": 110, "reasons": {"other_name": 100}, "examples": {}}
    (tmp_path / "rejected").mkdir()
    stub: Any = SimpleNamespace(
        path=tmp_path.joinpath,
        result=lambda name: inputs,
        run=SimpleNamespace(images=SimpleNamespace(max_bad_fraction=0.2)),
    )
    found = Rejections()
    for i in range(2):
        found.add("empty", f"{i}.jpg")
    check_so_far(stub, "shard-0", found)
    with pytest.raises(UserError, match="4 of 10 images are bad"):
        check_so_far(stub, "shard-1", found)


def test_examples_do_not_depend_on_the_order_of_units() -> None:
    names = [f"{i}.jpg" for i in range(9)]
    for seed in range(5):
        random.Random(seed).shuffle(names)
        whole = Rejections()
        for start in range(0, 9, 3):
            part = Rejections()
            for name in names[start : start + 3]:
                part.add("empty", name)
            whole.merge(part.as_json())
        assert whole.as_json() == {
            "reasons": {"empty": 9},
            "examples": {"empty": ["0.jpg", "1.jpg", "2.jpg"]},
        }


def outside(folder: Path) -> Path:
    (folder / "t.csv").write_text("image,label\n" + "".join(f"/x/{i}.jpg,a\n" for i in range(9)))
    return folder / "t.csv"


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


def cut_idx(folder: Path) -> Path:
    (folder / "t-images-idx3-ubyte.gz").write_bytes(b"cut")
    (folder / "t-labels-idx1-ubyte").write_bytes(b"")
    return folder


def other_names(folder: Path) -> Path:
    (folder / "cat").mkdir()
    (folder / "cat" / "1.txt").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (outside, "path_table", "9 link_outside .*folder.: '/x/0.jpg', '/x/1.jpg', '/x/2.jpg'"),
        (gone, "path_table", "2 unreadable .*missing.*: '1.jpg', '2.jpg'"),
        (listed_label, "path_table", "1 no_label .sample without a usable label.: '1.jpg'"),
        (truncated, "path_table", "1 damaged_table .*: 't.parquet'"),
        (truncated, "parquet", "1 damaged_table .*: 't.parquet'"),
        (cut_idx, "idx", "2 damaged_table .*: 't-images-idx3-ubyte.gz', 't-labels-idx1-ubyte'"),
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


def test_a_survey_that_leaves_nothing_says_why(tmp_path: Path) -> None:
    run = run_of(
        rotten(tmp_path / "images", num=2),
        tmp_path / "shards",
        selection={"min_images_per_class": 1},
        images={"max_bad_fraction": 1},
    )
    with pytest.raises(UserError, match=r"all 2 inputs are rejected\n  2 not_an_image"):
        prepare_here(run)
