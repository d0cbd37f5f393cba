"""data_prep/verify_shards.py as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.ranks.rank_processes import ROOT


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "data_prep/verify_shards.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_shards_of_make_shards_are_sound(digits_shards: Path) -> None:
    finished = verify(digits_shards)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{digits_shards}: valid; 1,797 samples" in finished.stdout


def test_damage_is_named(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards")
    tar = tmp_path / "shards/train-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-1])
    (tmp_path / "shards/test-000000.tar").unlink()
    finished = verify(tmp_path / "shards")
    assert finished.returncode == 2
    assert "test-000000.tar: cannot be read (No such file or directory)" in finished.stdout
    assert "train-000000.tar: holds more than the samples" in finished.stdout


def test_a_sheet_has_a_row_of_images_for_each_class(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards", classes=("cat", "dog", "eel"))
    finished = verify(tmp_path / "shards", "--sheet", tmp_path / "sheet.png")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet).reshape(3, -1, sheet.width, 3)
    assert all((row < 250).any() for row in pixels)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "no such folder"),
        ([".", "--num-workers", 0], "--num-workers: 0 is too small"),
    ],
)
def test_bad_arguments_end_with_one_clear_message(arguments: list[object], message: str) -> None:
    finished = verify(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr and "Traceback" not in finished.stderr
