"""Local tars that claim more than they hold are refused before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.indexing import tars
from data_prep.indexing.tars import MAX_HOLE_BYTES, TarUnit, check_holes, index_tar
from data_prep.sources.protocol import Container
from tests.support.corpora.preparing import run_of
from tests.support.corpora.tars import tar_bytes
from vitscale.config.errors import UserError


@pytest.mark.parametrize("has_data_after", [True, False])
def test_a_hole_of_a_terabyte_is_refused(has_data_after: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        file.write(b"header")
        file.truncate(1 << 40)
        if has_data_after:
            file.seek(0, os.SEEK_END)
            file.write(b"end")
    with pytest.raises(UserError, match=r"a hole of 1,099,511,[\d,]+ bytes"):
        check_holes(path)


def test_small_holes_and_whole_files_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"data")
    check_holes(path)
    os.truncate(path, MAX_HOLE_BYTES)
    check_holes(path)


def test_a_tar_with_a_hole_is_not_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_HOLE_BYTES", 1 << 20)
    (tmp_path / "a.tar").write_bytes(tar_bytes({"a.jpg": b"1"}))
    os.truncate(tmp_path / "a.tar", 4 << 20)
    run = run_of(tmp_path, tmp_path / "index", source={"kind": "webdataset"})
    container = Container("a.tar", "train")
    unit = TarUnit(run=run, folder=tmp_path, root=tmp_path, number=0, container=container)
    with pytest.raises(UserError, match="a hole of"):
        index_tar(unit)
