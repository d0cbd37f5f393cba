"""Where a preparation lies, and that it may be gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.preparation import Preparation, at_real_output
from tests.image_corpus import corpus
from tests.unit.data_prep.preparing import prepare_here, run_of
from vitscale.errors import UserError


def test_the_work_lies_beside_the_folder_that_a_linked_output_leads_to(tmp_path: Path) -> None:
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
def test_a_folder_that_vanishes_is_an_error_unless_another_process_finished(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    if finished:
        prepare_here(run)

    def opened_too_late(p: Preparation) -> None:
        (p.work.path / "results").mkdir()

    monkeypatch.setattr(Preparation, "open", opened_too_late)
    if finished:
        prepare_here(run)
    else:
        with pytest.raises(UserError, match="was removed while the work went on"):
            prepare_here(run)
