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

# More nested folders than CPython allows nested calls: a recursive walk would fail.
DEPTH = 1200


@pytest.fixture
def deep(tmp_path) -> Iterator[Path]:
    """cat/a.jpg, and a file below so many folders that pytest could not remove it."""
    root = tmp_path / "in"
    (root / "cat").mkdir(parents=True)
    (root / "cat/a.jpg").touch()

    # One step at a time: the whole path is longer than a system call takes.
    before = Path.cwd()
    try:
        os.chdir(root / "cat")
        for _ in range(DEPTH):
            os.mkdir("d")
            os.chdir("d")
        Path("b.jpg").touch()
    finally:
        os.chdir(before)
    yield root

    # shutil.rmtree, which pytest uses, recurses.
    subprocess.run(["rm", "-r", root], check=True)


def test_folders_may_be_deeper_than_calls(deep, tmp_path):
    expected = {f"{deep}/cat/a.jpg", f"{deep}/cat/{'d/' * DEPTH}b.jpg"}

    assert set(files_below(deep)) == expected
    assert set(find_files([str(deep)]).paths) == expected

    # The demo links images instead of copying them: it walks folders as well.
    link_some(deep, tmp_path / "out")
    assert len(list((tmp_path / "out/cat").iterdir())) == 2


def test_links_are_followed_once_or_not_at_all(tmp_path):
    root = tmp_path / "in"
    # .2 and .b are hidden; the last two lie in folders that systems make for themselves.
    for name in "a/1 a/.2 .b/3 c/d/4 lost+found/5 a/@eaDir/6".split():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    # Links to a folder above, to nothing, to itself, and to a folder beside it.
    (root / "a/up").symlink_to("..")
    (root / "a/broken").symlink_to("nowhere")
    (root / "a/round").symlink_to("round")
    (root / "e").symlink_to("c")

    # Links that are no folders count as files: reading them will say what is wrong.
    files = {os.path.relpath(path, root) for path in files_below(root)}
    assert files == {"a/1", "a/broken", "a/round", "c/d/4"}

    # c and e are one folder; it is entered once, by whichever name comes first.
    followed = list(files_below(root, follow_links=True))
    real_paths = {os.path.realpath(path) for path in followed}
    assert len(real_paths) == len(followed) == 4
    assert folders_in(root) == ["a", "c", "e"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError):
        list(files_below(file))

    # Only paths of this machine are looked for; URLs are checked where they are read.
    with refused("no such file or folder"):
        check_paths("hf://a/b", [str(tmp_path / "gone"), "s3://a/b"])
