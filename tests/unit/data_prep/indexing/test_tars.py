"""Local tars that claim more than they hold are refused before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep.indexing.tars import MAX_HOLE_BYTES, check_holes
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
