"""Which images a command reads, and what unreadable ones become."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from finetune.images import Images, find_files
from finetune.predicting import find_inputs
from finetune.settings import PredictRun
from tests.support.corpora.photographs import jpeg, photograph
from tests.support.corpora.shard_folders import make_shard_folder
from vitscale.config.errors import UserError
from vitscale.data.settings import DataSettings

SETTINGS = DataSettings(path="x", global_batch=1)


def filled(inputs: Images, number: int) -> tuple[torch.Tensor, list[str]]:
    out = torch.ones(3, 8, 8, dtype=torch.uint8)
    _, unreadable = inputs.samples(SETTINGS, image_size=8).fill(number, out)
    return out, [each.error for each in unreadable]


def test_folders_are_read_below_and_in_order(tmp_path: Path) -> None:
    names = ["b/2.jpg", "b/1.PNG", "a.webp", ".hidden/3.jpg", "b/.4.jpg", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_files([str(tmp_path), str(tmp_path / "notes.txt")])
    assert [os.path.relpath(path, tmp_path) for path in found.names(range(4))] == [
        "a.webp",
        "b/1.PNG",
        "b/2.jpg",
        "notes.txt",
    ]
    assert (found.total, found.num_left_out) == (4, 1)


def test_an_unreadable_file_is_a_blank_row_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(photograph(20, 10)))
    (tmp_path / "b.jpg").write_bytes(b"\xff\xd8\xff broken")
    (tmp_path / "c.jpg").touch()
    os.mkfifo(tmp_path / "d.jpg")
    (tmp_path / "e.jpg").symlink_to("nowhere")
    Image.new("RGB", (8, 8)).save(tmp_path / "f.GIF", "GIF")
    inputs = find_files([str(tmp_path)])
    pixels, errors = filled(inputs, 0)
    assert pixels.float().std() > 1 and errors == []
    reasons = ("", "", "is not a file", "No such file", "GIF is not read; convert it to JPEG")
    for number, reason in enumerate(reasons, start=1):
        pixels, errors = filled(inputs, number)
        assert pixels.sum() == 0 and len(errors) == 1 and reason in errors[0]
        assert " at 0x" not in errors[0]


def test_names_that_are_no_utf8_are_escaped() -> None:
    files = Images(paths=[os.fsdecode(b"\xff.jpg"), "b.jpg"])
    assert files.names([1, 0]) == ["b.jpg", "\\xff.jpg"]


def test_shards_come_alone(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards")
    shards = str(tmp_path / "shards")
    images = find_inputs(PredictRun(init="x", images=(shards,)))
    assert (images.total, images.label_name(1), images.label_name(-1)) == (2, "dog", None)
    assert len(set(images.names([0, 1]))) == 2
    with pytest.raises(UserError, match="is a shard folder, and 2 inputs are given"):
        find_inputs(PredictRun(init="x", images=(shards, shards)))
