"""Which of equal images stays, across splits and inside each."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.pipeline import row_tables
from tests.support.corpora.image_corpus import encoded, ledger
from tests.support.corpora.preparing import prepare_here, run_of

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
