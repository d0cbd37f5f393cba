"""The folder of a preparation: its place, its owner, and missing or leftover ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.make_shards import STEPS
from data_prep.sources.errors import Outage
from data_prep.steps import settings
from data_prep.steps.settings import (
    at_real_output,
    changed_settings,
    content_config,
    open_work_folder,
    store_failure,
)
from data_prep.steps.work import WorkFolder, run_steps
from tests.support.corpora.image_corpus import corpus
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError


def test_work_folder_is_beside_the_target_of_a_linked_output(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    plain = run_of(tmp_path, tmp_path / "disk" / "shards")
    assert at_real_output(plain) is plain
    for name in ("there", "not_there"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    (tmp_path / "disk" / "there").mkdir()
    (tmp_path / "chain").symlink_to("there")
    for name, target in (("there", "there"), ("not_there", "not_there"), ("chain", "there")):
        run = at_real_output(run_of(tmp_path, tmp_path / name))
        assert run.output == os.path.realpath(tmp_path / "disk" / target)


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "shards").symlink_to("/proc")
    for output in (tmp_path / "shards", Path("/proc")):
        with pytest.raises(UserError, match=r"mount point(.|\n)*next: .*/proc/shards"):
            at_real_output(run_of(tmp_path, output))


def test_a_command_with_other_settings_is_refused_while_one_runs(tmp_path: Path) -> None:
    source = corpus(tmp_path / "images")
    first, second = (run_of(source, tmp_path / "shards", seed=seed) for seed in (1, 2))
    open_work_folder(WorkFolder(first))
    with pytest.raises(UserError, match="begun with other settings: seed"):
        open_work_folder(WorkFolder(second))
    open_work_folder(WorkFolder(first))


def test_files_of_unknown_settings_are_no_work_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SETTINGS_WAIT_S", 0.1)
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    (tmp_path / ".shards.preparing" / "results").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no settings.json(.|\n)*next: remove this folder"):
        open_work_folder(WorkFolder(run))


def test_all_tasks_end_with_the_error_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    folder = tmp_path / ".shards.preparing"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    open_work_folder(WorkFolder(run))
    prepare_here(run, until="write shards")
    store_failure(WorkFolder(run), UserError("all bad"))
    assert not (folder / "spool").exists() and not (folder / "tars").exists()
    with pytest.raises(UserError, match="all bad"):
        open_work_folder(WorkFolder(run))
    with pytest.raises(UserError, match="all bad"):
        run_steps(WorkFolder(run.model_copy(update={"num_workers": 1})), STEPS)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "8")
    open_work_folder(WorkFolder(run))
    assert {path.name for path in folder.iterdir()} == {"settings.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"images", ".shards.preparing"}


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
