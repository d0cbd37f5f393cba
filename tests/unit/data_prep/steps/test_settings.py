"""The folder of a preparation: its place, its owner, and missing or leftover ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.sources.protocol import Outage
from data_prep.steps.settings import (
    at_real_output,
    changed_settings,
    content_config,
)
from tests.support.corpora.image_corpus import corpus
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "shards").symlink_to("/proc")
    for output in (tmp_path / "shards", Path("/proc")):
        with pytest.raises(UserError, match=r"mount point(.|\n)*next: .*/proc/shards"):
            at_real_output(run_of(tmp_path, output))


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_no_output_gets_its_name_without_all_its_tars(fault: str, tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    work = prepare_here(run, until="finish")
    tar = next((work.path / "tars").glob("train-*.tar"))
    if fault == "gone":
        tar.unlink()
    else:
        os.truncate(tar, tar.stat().st_size - 512)
    with pytest.raises(Outage, match="train-000000.tar, written before, is missing or has"):
        prepare_here(run)
    assert not (tmp_path / "shards").exists() and work.path.exists()


LABEL_FILES = {"map": "map.csv", "space": "space.txt"}


@pytest.mark.parametrize("key", LABEL_FILES)
def test_changed_label_files_change_the_settings(key: str, tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("cat,animal\ndog,animal\n")
    (tmp_path / "space.txt").write_text("animal\nplant\n")
    labels = {key: str(tmp_path / name) for key, name in LABEL_FILES.items()}
    run = run_of(tmp_path / "images", tmp_path / "shards", labels=labels)
    before = content_config(run)
    assert changed_settings(before, content_config(run)) == []
    (tmp_path / LABEL_FILES[key]).write_text("plant\nanimal\n" if key == "space" else "cat,plant\n")
    assert changed_settings(before, content_config(run)) == [f"labels.{key}_blake3"]
    (tmp_path / LABEL_FILES[key]).unlink()
    with pytest.raises(UserError, match=f"labels.{key}"):
        content_config(run)


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
