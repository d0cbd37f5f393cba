from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from data_prep.sources.files import file_containers, is_tar_name
from data_prep.sources.registry import SOURCES
from tests.support.corpora.tars import write_tars
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import SourceKind, SourceSettings


def files(root: Path, **splits: str) -> list[tuple[str, str]]:
    settings = SourceSettings(kind="webdataset", path=str(root), splits=splits)
    return [(box.split, box.path) for box in file_containers(settings, is_tar_name, kind="tars")]


def test_splits_may_share_a_folder_by_patterns(tmp_path: Path) -> None:
    names = [f"d/x-train-{i:04}.tar" for i in range(3)] + ["d/x-val-0000.tar"]
    write_tars(tmp_path, {name: {} for name in names})
    assert files(tmp_path, train="d/x-train-{0000..0002}.tar", test="d/x-val-*.tar") == [
        *(("train", name) for name in names[:3]),
        ("test", "d/x-val-0000.tar"),
    ]
    for splits, message in [
        ({"train": "d/x-train-{0000..0003}.tar"}, "has no 'x-train-0003.tar'"),
        ({"train": "d/x-train-*.tar", "test": "d/x-*.tar"}, "two splits share files"),
        ({"train": "d/x-train-*.tar", "test": "d/y-*.tar"}, "source.splits.test.*contains no tars"),
        ({"train": "d/{a}{.tar"}, "source.splits.train.*not a pattern"),
        ({"train": "e/x-*.tar"}, "source.splits.train.*no such"),
        ({"train": "../*.tar"}, "source.splits.train.*is outside"),
        ({"train": "d", "test": "d/x-val-0000.tar"}, "two splits share files"),
    ]:
        with pytest.raises(UserError, match=message):
            files(tmp_path, **splits)


def test_the_settings_name_every_kind_of_source() -> None:
    assert set(get_args(SourceKind)) == SOURCES.keys()
