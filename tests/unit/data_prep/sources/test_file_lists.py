from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.sources.file_lists import FileList, name_pattern
from data_prep.sources.paths import is_tar_name
from tests.support.corpora.tars import write_tars
from vitscale.config.errors import UserError
from vitscale.runs.data_prep import SourceSettings


def files(root: Path, **splits: str) -> list[tuple[str, str]]:
    settings = SourceSettings(kind="webdataset", path=str(root), splits=splits)
    boxes = FileList(settings, is_tar_name, "tar files").containers()
    return [(box.split, box.path) for box in boxes if not (root / box.path).is_dir()]


@pytest.mark.parametrize(
    "pattern, yes, no",
    [
        ("a-*.tar", ["a-.tar", "a-1.tar", "a-\n.tar"], ["b-1.tar", "a-1.tar.gz", "xa-1.tar"]),
        ("a?.tar", ["a1.tar"], ["a.tar", "a12.tar"]),
        ("{08..11}.tar", ["08.tar", "11.tar"], ["8.tar", "12.tar", "07.tar", "008.tar", "٠٨.tar"]),
        ("{8..11}.tar", ["8.tar", "11.tar"], ["08.tar", "12.tar"]),
        ("{a,b+}-{0..1}.tar", ["a-0.tar", "b+-1.tar"], ["b-1.tar", "a-2.tar"]),
        ("[1].tar", ["[1].tar"], ["1.tar"]),
    ],
)
def test_patterns_match_like_shell_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    names = name_pattern(pattern)
    assert [name for name in yes + no if names.matches(name)] == yes


def test_large_ranges_are_not_expanded() -> None:
    names = name_pattern("{000000000..999999999}-{0..999999999}.tar")
    assert names.num_names == 10**18 and names.matches("123456789-5.tar")


@pytest.mark.parametrize(
    "pattern", ["{3..1}", "{a}", "{1..2", "1}", "{{1..2},3}", "{1..9999999999}"]
)
def test_malformed_braces_are_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="source.splits.train"):
        files(tmp_path, train=pattern)


def test_splits_may_share_a_folder_by_patterns(tmp_path: Path) -> None:
    names = [f"d/x-train-{i:04}.tar" for i in range(3)] + ["d/x-val-0000.tar"]
    write_tars(tmp_path, {name: {} for name in names})
    assert files(tmp_path, train="d/x-train-{0000..0002}.tar", test="d/x-val-*.tar") == [
        *(("train", name) for name in names[:3]),
        ("test", "d/x-val-0000.tar"),
    ]
    for splits, message in [
        ({"train": "d/x-train-{0000..0003}.tar"}, "3 of the 4 tar files"),
        ({"train": "d/x-train-*.tar", "test": "d/x-*.tar"}, "two splits share files"),
        ({"train": "d/x-train-*.tar", "test": "d/y-*.tar"}, "source.splits.test.*contains no tar"),
        ({"train": "e/x-*.tar"}, "source.splits.train.*no such"),
        ({"train": "../*.tar"}, "source.splits.train.*is outside"),
        ({"train": "d", "test": "d/x-val-0000.tar"}, "two splits share files"),
    ]:
        with pytest.raises(UserError, match=message):
            files(tmp_path, **splits)


def test_patterns_that_match_outside_links_are_refused(tmp_path: Path) -> None:
    write_tars(tmp_path, {"beside/1.tar": {}, "root/2.tar": {}})
    (tmp_path / "root/1.tar").symlink_to("../beside/1.tar")
    assert files(tmp_path / "root") == [("train", "2.tar")]
    with pytest.raises(UserError, match="link out of the source"):
        files(tmp_path / "root", train="*.tar")
    assert len(files(tmp_path, train="root/*.tar")) == 2
