"""Which of equal images stays, and shards whose source has its classes ignored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpora.lookalikes import inspection_picture
from benchmarks.near_duplicates import encoded as png
from benchmarks.near_duplicates import matching_pairs
from data_prep.duplicates.descriptors import image_descriptors
from data_prep.pipeline import row_tables
from data_prep.shards.tar_walk import walk_tar
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.registry import SOURCES
from data_prep.verification.checks import check_folder
from tests.support.corpora.image_corpus import encoded, ledger
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest, read_split
from vitscale.data.index_keys import sample_keys

NUM_PICTURES = 8


@pytest.mark.parametrize("bucket_rows", [4, 1000])
@pytest.mark.parametrize("duplicates", ["drop_exact", "drop_similar"])
def test_of_equal_images_the_train_one_is_dropped(
    duplicates: str, bucket_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tables, "BUCKET_ROWS", bucket_rows)
    for number in range(NUM_PICTURES):
        for name in (f"train/cat/{number}", f"val/cat/{number}"):
            write(tmp_path / "images" / f"{name}.png", seed=number)
    write(tmp_path / "images/train/cat/only.png", seed=100)
    rows = prepared(tmp_path, duplicates)
    reasons = {path: row["reason"] for path, row in rows.items()}
    for number in range(NUM_PICTURES):
        assert reasons[f"train/cat/{number}.png"] == "exact_duplicate"
        assert rows[f"train/cat/{number}.png"]["detail"] == f"val/cat/{number}.png"
        assert reasons[f"val/cat/{number}.png"] is None
    assert reasons["train/cat/only.png"] is None


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_of_equal_images_inside_a_split_is_kept(split: str, tmp_path: Path) -> None:
    for number in range(NUM_PICTURES):
        for copy in "abc":
            write(tmp_path / "images" / split / f"cat/{number}{copy}.png", seed=number)
    other = "val" if split == "train" else "train"
    write(tmp_path / "images" / other / "cat/only.png", seed=100)
    rows = prepared(tmp_path, "drop_exact")
    for number in range(NUM_PICTURES):
        copies = {f"{split}/cat/{number}{copy}.png" for copy in "abc"}
        kept = {path for path in copies if rows[path]["reason"] is None}
        assert len(kept) == 1
        for path in copies - kept:
            assert rows[path]["reason"] == "exact_duplicate" and rows[path]["detail"] in kept


def lookalikes(folder: Path) -> list[str]:
    """Grey surfaces that descriptors take for copies, and one true copy of the first of them."""
    contents = [png(inspection_picture(seed)[0], "PNG") for seed in range(80)]
    pairs = matching_pairs(image_descriptors(contents))
    chosen = sorted({number for pair in pairs for number in pair})
    for number in chosen:
        defect = inspection_picture(number)[1]
        (folder / defect).mkdir(parents=True, exist_ok=True)
        (folder / defect / f"{number}.png").write_bytes(contents[number])
    first = inspection_picture(chosen[0])
    (folder / "copy").mkdir()
    (folder / "copy/copy.jpg").write_bytes(png(first[0], "JPEG", quality=95))
    return ["copy/copy.jpg", f"{first[1]}/{chosen[0]}.png"]


@pytest.mark.parametrize("unit", [1, 1024])
def test_lookalikes_are_kept_and_counted(
    unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.duplicates.likely_copies.CANDIDATES_PER_UNIT", unit)
    twins = lookalikes(tmp_path / "images")
    selection = {"duplicates": "drop_similar", "max_similar_fraction": 0.5}
    shared = {"labels": {"values": "none"}, "selection": selection}
    prepare_here(run_of(tmp_path / "images", tmp_path / "shards", **shared))
    rows = ledger(tmp_path / "shards")
    (dropped,) = [path for path, row in rows.items() if row["reason"] == "similar_duplicate"]
    assert {dropped, rows[dropped]["detail"]} == set(twins)
    counts = read_manifest(tmp_path / "shards").inputs["likely_copies"]["counts"]
    assert counts["similar"] == 1 and counts["unlike"] >= 3


def test_copies_of_evaluation_images_are_looked_at(tmp_path: Path) -> None:
    twins = lookalikes(tmp_path / "images")
    (tmp_path / "val").mkdir()
    (tmp_path / "images" / twins[0]).rename(tmp_path / "val/seen.jpg")
    (tmp_path / "images/copy").rmdir()
    selection = {"evaluation_sets": [str(tmp_path / "val")], "max_similar_fraction": 0.5}
    run = run_of(tmp_path / "images", tmp_path / "shards", selection=selection)
    prepare_here(run)
    rows = ledger(tmp_path / "shards")
    matched = [path for path, row in rows.items() if row["reason"] == "in_evaluation_set"]
    assert matched == [twins[1]]
    counts = read_manifest(tmp_path / "shards").inputs["likely_copies"]["counts"]
    assert counts["in_evaluation_set"] == 1 and counts["unlike"] >= 1
    refused = run.model_copy(
        update={
            "output": str(tmp_path / "refused"),
            "selection": run.selection.model_copy(update={"max_similar_fraction": 0.0}),
        }
    )
    with pytest.raises(UserError, match="images look like others"):
        prepare_here(refused)


def test_files_that_will_be_refused_need_no_space(tmp_path: Path) -> None:
    for number in range(NUM_PICTURES):
        write(tmp_path / "images" / f"cat/{number}.png", seed=number)
    with open(tmp_path / "images/cat/hole.png", "wb") as file:
        file.truncate(1 << 42)  # sparse: 4 TiB that take no disk
    images = {"max_file_mib": 1, "max_bad_fraction": 1}
    prepare_here(run_of(tmp_path / "images", tmp_path / "shards", images=images))
    rows = ledger(tmp_path / "shards")
    assert rows["cat/hole.png"]["reason"] == "too_large"
    assert len(rows) == NUM_PICTURES + 1
    shards = read_manifest(tmp_path / "shards").splits["train"].shards
    assert [shard.samples for shard in shards] == [NUM_PICTURES]


def write(path: Path, *, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded("PNG", seed=seed))


def prepared(folder: Path, duplicates: str) -> dict[str, dict[str, object]]:
    """The ledger of the shards made from `folder`/images."""
    run = run_of(
        folder / "images",
        folder / "shards",
        source={"splits": {"train": "train", "val": "val"}},
        selection={"duplicates": duplicates},
    )
    prepare_here(run)
    return ledger(folder / "shards")


@pytest.mark.parametrize("has_label_values, classes", [(False, ("10", "2")), (True, ("2", "10"))])
def test_numbers_of_a_new_source_are_labels_if_it_says_so(
    has_label_values: bool,
    classes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NewSource(ImageFolder):
        pass

    NewSource.has_label_values = has_label_values
    monkeypatch.setitem(SOURCES, "image_folder", NewSource)
    for number in (2, 10):
        write(tmp_path / f"images/train/{number}/a.png", seed=number)
        write(tmp_path / f"images/val/{number}/a.png", seed=100 + number)
    prepared(tmp_path, "keep")
    found = read_manifest(str(tmp_path / "shards")).classes
    assert tuple(name for name in found if name in classes) == classes


def test_ignored_classes_leave_no_label(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"images/{'' if number % 4 else 'sub/'}{number}.png", seed=number)
    source = {"holdout_fraction": 0.2}
    run = run_of(tmp_path / "images", tmp_path / "s", source=source, labels={"values": "none"})
    prepare_here(run)
    manifest = read_manifest(tmp_path / "s")
    assert manifest.classes == ()
    sizes = {name: entry.num_samples for name, entry in manifest.splits.items()}
    assert sizes == {"train": 16, "test": 4}
    keys, members = set(), set()
    for split in sizes:
        index = read_split(tmp_path / "s", split=split)
        assert set(index.label.tolist()) == {-1}
        keys |= {
            key.removeprefix(f"{split}-") for key in sample_keys(index, range(len(index.label)))
        }
        for path in index.shard_paths:
            with open(path, "rb") as file:
                members |= {m.name for m in walk_tar(file.fileno(), end=path.stat().st_size)}
    assert {name.rpartition(".")[2] for name in members} == {"png"} and len(members) == 20
    assert {key for key in keys if "sub" not in key} == {str(n) for n in range(20) if n % 4}
    assert {row["class"] for row in ledger(tmp_path / "s").values()} == {None}
    found = check_folder(tmp_path / "s", manifest=manifest, num_workers=1, advance=lambda num: None)
    assert found == []


def test_without_labels_a_corpus_of_bad_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/bad.png").write_bytes(b"no image")
    sections = {"labels": {"values": "none"}, "images": {"max_bad_fraction": 1.0}}
    with pytest.raises(UserError, match="no usable image is left\n"):
        prepare_here(run_of(tmp_path / "images", tmp_path / "s", **sections))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("labels", "space", "imagenet_1k"),
        ("labels", "map", "map.csv"),
        ("labels", "parents", "parents.csv"),
        ("source", "val_per_class", 5),
        ("selection", "min_images_per_class", 5),
    ],
)
def test_ignored_classes_refuse_settings_of_classes(
    section: str, key: str, value: object, tmp_path: Path
) -> None:
    sections = {"source": {}, "labels": {"values": "none"}, "selection": {}}
    sections[section][key] = value
    run = run_of(tmp_path, tmp_path / "s", **sections)
    assert [name for name, _ in run.problems()] == [f"{section}.{key}"]


def test_a_held_out_split_never_takes_all_images_of_a_class(tmp_path: Path) -> None:
    for name, num in (("few", 2), ("many", 5), ("one", 1)):
        for number in range(num):
            write(tmp_path / f"images/{name}/{number}.png", seed=100 * num + number)
    source = {"val_per_class": 2, "holdout_split": "val"}
    prepare_here(run_of(tmp_path / "images", tmp_path / "s", source=source))
    found = {}
    for split in ("train", "val"):
        index = read_split(tmp_path / "s", split=split)
        found[split] = np.bincount(index.label, minlength=3).tolist()
    assert index.classes == ("few", "many", "one")
    assert found == {"train": [1, 3, 1], "val": [1, 2, 0]}
