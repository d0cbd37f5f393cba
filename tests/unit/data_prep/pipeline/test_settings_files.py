"""Files that settings name: another content is another setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.pipeline.workspace import changed_settings, content_config
from tests.support.corpora.preparing import run_of
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import DataPrepRun

LABEL_FILES = {"map": "map.csv", "space": "space.txt"}


def labelled(tmp_path: Path) -> DataPrepRun:
    (tmp_path / "map.csv").write_text("cat,animal\ndog,animal\n")
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


@pytest.mark.parametrize("key", ["leave_out", "val_labels"])
def test_a_changed_list_changes_the_settings(key: str, tmp_path: Path) -> None:
    listed = tmp_path / "list"
    run = run_of(tmp_path, tmp_path / "out", source={key: str(listed)})
    with pytest.raises(UserError, match=f"source.{key}"):
        content_config(run)
    listed.write_bytes(b"one")
    before = content_config(run)
    listed.write_bytes(b"other")
    assert changed_settings(before, content_config(run)) == [f"source.{key}_blake3"]
