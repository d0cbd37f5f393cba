"""Names of images, and shards that come with other inputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.images import Images
from finetune.predicting import find_inputs
from finetune.settings import PredictRun
from tests.support.corpora.shard_folders import make_shard_folder
from vitscale.config.errors import UserError


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
