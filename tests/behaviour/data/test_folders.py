"""Files below a folder: links, hidden ones, folders deeper than Python's calls."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.images import find_files
from finetune.settings import check_paths
from launch.demo import link_some
from tests.support.tables import refused
from vitscale.data.folders import files_below, folders_in


@pytest.fixture
def deep(tmp_path) -> Iterator[Path]:
    """cat/a.jpg, and a file below 1,200 folders, which pytest could not remove."""
    (tmp_path / "in/cat").mkdir(parents=True)
    (tmp_path / "in/cat/a.jpg").touch()
    before = Path.cwd()
    try:
        os.chdir(tmp_path / "in/cat")
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("b.jpg").touch()
    finally:
        os.chdir(before)
    yield tmp_path / "in"
    subprocess.run(["rm", "-r", tmp_path / "in"], check=True)


def test_folders_may_be_deeper_than_calls(deep, tmp_path):
    expected = {f"{deep}/cat/a.jpg", f"{deep}/cat/{'d/' * 1200}b.jpg"}
    assert set(files_below(deep)) == expected
    assert set(find_files([str(deep)]).paths) == expected
    link_some(deep, tmp_path / "out")
    assert len(list((tmp_path / "out/cat").iterdir())) == 2


def test_links_are_followed_once_or_not_at_all(tmp_path):
    for name in "a/1 a/.2 .b/3 c/d/4 lost+found/5 a/@eaDir/6".split():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    (tmp_path / "in/a/up").symlink_to("..")
    (tmp_path / "in/a/broken").symlink_to("nowhere")
    (tmp_path / "in/a/round").symlink_to("round")
    (tmp_path / "in/e").symlink_to("c")
    files = {
        os.path.relpath(path, tmp_path / "in") for path in files_below(tmp_path / "in")
    }
    assert files == {"a/1", "a/broken", "a/round", "c/d/4"}
    followed = list(files_below(tmp_path / "in", follow_links=True))
    assert len({os.path.realpath(path) for path in followed}) == len(followed) == 4
    assert folders_in(tmp_path / "in") == ["a", "c", "e"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").touch()
    with pytest.raises(NotADirectoryError):
        list(files_below(tmp_path / "in/file"))
    with refused("no such file or folder"):
        check_paths("hf://a/b", [str(tmp_path / "gone"), "s3://a/b"])
