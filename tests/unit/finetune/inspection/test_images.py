"""Images come from files or shards, evenly spaced; unreadable ones are skipped and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune.inspection.visualized import Visualized
from finetune.settings import VisualizeRun
from tests.support.corpora.small_shards import image_bytes, make_shard_folder
from tests.support.engine.small_models import small_model
from tests.support.engine.vit_models import CPU
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.data.samples import EvaluationSamples
from vitscale.data.settings import DataSettings

SIZE = 16


def visualized(*images: Path) -> Visualized:
    run = VisualizeRun(init="x", images=tuple(map(str, images)))
    return Visualized(run, small_model(), CPU)


def test_a_folder_gives_evenly_spaced_images_of_its_classes(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / "abc"[number % 3] / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_bytes("png", seed=number))
    titles, pixels = visualized(tmp_path).sheet(3)
    assert titles == ["a", "b", "c"] and pixels.shape == (3, 3, SIZE, SIZE)
    titles, pixels = visualized(tmp_path / "b/001.png").sheet(8)
    assert titles == ["001"] and len(pixels) == 1
    (tmp_path / "a/000.png").write_bytes(b"no image")
    subject = visualized(tmp_path)
    assert subject.sheet(3)[0] == ["b", "c"]
    (skipped,) = subject.skipped
    assert "000.png: cannot identify image file" in skipped and " at 0x" not in skipped
    with pytest.raises(UserError, match="no image can be read"):
        visualized(tmp_path / "a/000.png").sheet(3)


def test_shards_give_the_evaluations_pixels_and_classes(tmp_path: Path) -> None:
    """Of a damaged sample it is said where it is."""
    make_shard_folder(tmp_path / "shards", lengths={"test": (4, 3)})
    index = read_split(str(tmp_path / "shards"), split="test")
    with open(index.shard_paths[0], "r+b") as file:
        file.seek(int(index.offset[2]))
        file.write(bytes(int(index.length[2])))
    subject = visualized(tmp_path / "shards")
    titles, pixels = subject.sheet(3)
    expected = torch.empty(3, SIZE, SIZE, dtype=torch.uint8)
    settings = DataSettings(path="", global_batch=1)
    samples = EvaluationSamples(index, settings=settings, image_size=SIZE)
    for title, found, number in zip(titles, pixels, (0, 4), strict=True):
        label, _ = samples.fill(number, expected)
        assert torch.equal(found, expected) and title == index.classes[label]
    (skipped,) = subject.skipped
    assert f" in {index.shard_paths[0]}: " in skipped
