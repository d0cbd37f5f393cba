"""Files that settings name: another content is another setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.pipeline.workspace import SETTINGS_NAME, changed_settings, content_config
from tests.support.corpora.image_corpus import corpus
from tests.support.corpora.preparing import prepare_here, run_of
from tests.support.corpora.small_shards import make_shard_folder
from vitscale.config.errors import UserError
from vitscale.data.index import read_manifest
from vitscale.distributed.atomic_files import write_json
from vitscale.runs.data_prep import DataPrepRun

LABEL_FILES = {"map": "map.csv", "parents": "parents.csv", "space": "space.txt"}


def labelled(tmp_path: Path) -> DataPrepRun:
    (tmp_path / "map.csv").write_text("cat,animal\ndog,animal\n")
    (tmp_path / "parents.csv").write_text("animal,thing\n")
    (tmp_path / "space.txt").write_text("animal\nplant\n")
    labels = {key: str(tmp_path / name) for key, name in LABEL_FILES.items()}
    return run_of(tmp_path / "images", tmp_path / "shards", labels=labels)


@pytest.mark.parametrize("key", LABEL_FILES)
def test_changed_label_files_change_the_settings(key: str, tmp_path: Path) -> None:
    run = labelled(tmp_path)
    before = content_config(run)
    assert changed_settings(before, content_config(run)) == []
    (tmp_path / LABEL_FILES[key]).write_text("plant\nanimal\n" if key == "space" else "cat,plant\n")
    assert changed_settings(before, content_config(run)) == [f"labels.{key}_blake3"]
    (tmp_path / LABEL_FILES[key]).unlink()
    with pytest.raises(UserError, match=f"labels.{key}"):
        content_config(run)


def test_known_spaces_are_not_hashed(tmp_path: Path) -> None:
    for labels in ({}, {"space": "imagenet_1k"}):
        run = run_of(tmp_path / "images", tmp_path / "shards", labels=labels)
        assert content_config(run)["labels"] == run.labels.model_dump(mode="json")


def swap_image(folder: Path) -> None:
    (folder / "cat" / "000.jpg").write_bytes(b"another size")


def add_image(folder: Path) -> None:
    (folder / "cat" / "new.png").write_bytes(b"")


@pytest.mark.parametrize("change", [swap_image, add_image])
def test_changed_evaluation_images_change_the_settings(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = corpus(tmp_path / "evaluation", num=2)
    (folder / "loop").symlink_to(folder)
    run = run_of(tmp_path, tmp_path / "out", selection={"evaluation_sets": [str(folder)]})
    before = content_config(run)
    (folder / "notes.txt").write_text("no image")
    assert changed_settings(before, content_config(run)) == []
    change(folder)
    changed = changed_settings(before, content_config(run))
    assert changed == ["selection.evaluation_sets_listing"]


def test_changed_evaluation_shards_change_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    run = run_of(tmp_path, tmp_path / "out", selection={"evaluation_sets": [str(folder)]})
    with pytest.raises(UserError, match="no such folder"):
        content_config(run)
    make_shard_folder(folder)
    before = content_config(run)
    (folder / "index.parquet").write_bytes(b"another")
    assert content_config(run) != before


def test_a_map_that_changes_during_the_run_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "images", num=2)
    run = labelled(tmp_path)
    p = prepare_here(run, until="count inputs")
    write_json(p.path(SETTINGS_NAME), content_config(run))
    (tmp_path / "map.csv").write_text("cat,animal\ndog,plant\n")
    with pytest.raises(UserError, match="labels.map_blake3: changed while"):
        prepare_here(run)
    (tmp_path / "map.csv").write_text("cat,animal\ndog,animal\n")
    prepare_here(run)
    assert "map_blake3" in read_manifest(tmp_path / "shards").config["labels"]
