"""The folder of a preparation: its place, its owner, and missing or leftover ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep import make_shards
from data_prep.pipeline import finishing
from data_prep.pipeline.phases import Phase
from data_prep.pipeline.workspace import Preparation, at_real_output
from data_prep.sources.outages import ChangedSource, Interrupted, changed_source_error
from tests.support.corpora.image_corpus import contents, corpus
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.config.errors import UserError
from vitscale.data.index import MANIFEST_NAME


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


@pytest.mark.parametrize("finished", [True, False])
def test_vanished_folder_is_an_error_unless_finished_elsewhere(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    if finished:
        prepare_here(run)

    def opened_too_late(p: Preparation) -> None:
        shutil.rmtree(p.work.path, ignore_errors=True)
        (p.work.path / "results").mkdir()

    monkeypatch.setattr(Preparation, "open", opened_too_late)
    if finished:
        prepare_here(run)
    else:
        with pytest.raises(UserError, match="was removed during the work"):
            prepare_here(run)


def test_concurrent_start_with_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path / "images")
    first, second = (run_of(source, tmp_path / "shards", seed=seed) for seed in (1, 2))
    own = make_shards.make_work_folder

    def later(folder: Path, settings: dict[str, Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(make_shards, "make_work_folder", own)
            make_shards.open_work_folder(first)
        own(folder, settings)

    monkeypatch.setattr(make_shards, "make_work_folder", later)
    with pytest.raises(UserError, match="begun with other settings: seed"):
        make_shards.open_work_folder(second)
    make_shards.open_work_folder(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shards.preparing", "images"]


def test_work_abandoned_at_its_start_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    monkeypatch.setattr(make_shards, "make_work_folder", lambda *_: None)
    with pytest.raises(Interrupted, match="another process ended the preparation"):
        make_shards.open_work_folder(run)


def test_files_of_unknown_settings_are_no_work_to_go_on_with(tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    (tmp_path / ".shards.preparing" / "results").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no settings.json(.|\n)*next: remove this folder"):
        make_shards.open_work_folder(run)


def test_work_left_by_one_killed_at_the_end_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    make_shards.open_work_folder(run)
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "remove_folder", lambda path: None)
        work = prepare_here(run).work.path
    expected = contents(tmp_path / "shards")
    assert list((work / "results").glob("shard-*.json"))
    shutil.rmtree(tmp_path / "shards")
    make_shards.open_work_folder(run)
    assert not list(work.rglob("shard-*.json"))
    prepare_here(run)
    assert contents(tmp_path / "shards") == expected and not work.exists()


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_no_output_gets_its_name_without_all_its_tars(fault: str, tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    p = prepare_here(run, until="finish")
    tar = next(p.path("tars").glob("train-*.tar"))
    if fault == "gone":
        tar.unlink()
    else:
        os.truncate(tar, tar.stat().st_size - 512)
    with pytest.raises(Interrupted, match="train-000000.tar, written before, is missing or has"):
        prepare_here(run)
    assert not (tmp_path / "shards").exists() and p.has_result("index")


def test_a_late_process_does_not_undo_a_finished_output(tmp_path: Path) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")

    def finished_by_others(p: Preparation, unit: str) -> None:
        if unit == "finished":
            p.output.mkdir()
            (p.output / MANIFEST_NAME).touch()
        raise changed_source_error("cat/000.jpg", file="cat/000.jpg")

    for unit in ("not yet", "finished"):
        phase = Phase(title="late", units=lambda p, unit=unit: [unit], do=finished_by_others)
        if unit == "finished":
            prepare_here(run, phases=(phase,))
        else:
            with pytest.raises(ChangedSource):
                prepare_here(run, phases=(phase,))
