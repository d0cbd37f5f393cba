"""Images come from files or shards, evenly spaced; unreadable ones are skipped and counted."""

from __future__ import annotations

from pathlib import Path

import torch

from finetune.inspection.visualized import ImageReader
from finetune.predicting.inputs import Files, Shards, find_files
from tests.support.corpora.small_shards import image_bytes, make_shard_folder
from vitscale.data.index import read_split
from vitscale.data.samples import EvaluationSamples
from vitscale.data.settings import DataSettings

SIZE = 6
SETTINGS = DataSettings(path="", global_batch=1)


def reader(inputs: Files | Shards, *roots: Path) -> ImageReader:
    return ImageReader(inputs, settings=SETTINGS, image_size=SIZE, roots=[*map(str, roots)])


def files(path: Path) -> ImageReader:
    return reader(find_files([str(path)]), path)


def folder_of(folder: Path, *, good: int, bad: tuple[int, ...] = ()) -> Path:
    for number in range(good + len(bad)):
        path = folder / "abc"[number % 3] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if number in bad else image_bytes("png", seed=number))
    (folder / "notes.txt").write_text("no image either")
    return folder


def test_a_folder_gives_evenly_spaced_images_of_its_classes(tmp_path: Path) -> None:
    found = files(folder_of(tmp_path, good=12)).sheet(3)
    assert found.numbers == (0, 4, 8)
    assert found.titles == ("a", "b", "c")
    assert found.pixels_B3SS.shape == (3, 3, SIZE, SIZE)
    batch = files(tmp_path / "b/001.png").sheet(8)
    assert (len(batch), batch.titles) == (1, ("001",))


def test_unreadable_images_are_replaced_and_counted(tmp_path: Path) -> None:
    images = files(folder_of(tmp_path, good=9, bad=(0, 3, 6)))
    batches = list(images.spaced(6, batch=4))  # of a: 0, 3, 6, 9; two files for each place
    assert [batch.numbers for batch in batches] == [(3, 4, 6, 8), (10,)]
    assert set(images.skipped) == {0, 1, 2}
    assert "000.png: cannot identify image file" in images.skipped[0]
    assert " at 0x" not in images.skipped[0]


def test_shards_give_the_evaluations_pixels_and_classes(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards", lengths={"test": (4, 3)})
    index = read_split(str(tmp_path / "shards"), split="test")
    found = reader(Shards(index)).sheet(3)
    expected = torch.empty(3, SIZE, SIZE, dtype=torch.uint8)
    samples = EvaluationSamples(index, settings=SETTINGS, image_size=SIZE)
    for row, number in enumerate(found.numbers):
        label, _ = samples.fill(number, expected)
        assert torch.equal(found.pixels_B3SS[row], expected)
        assert found.titles[row] == index.classes[label]


def test_a_damaged_sample_of_a_shard_is_skipped(tmp_path: Path) -> None:
    make_shard_folder(tmp_path / "shards", lengths={"test": (4,)})
    index = read_split(str(tmp_path / "shards"), split="test")
    path, start = index.shard_paths[0], int(index.offset[1])
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(int(index.length[1])))
    images = reader(Shards(index))
    assert images.sheet(4).numbers == (0, 2, 3)
    assert f" in {path}: " in images.skipped[1]
