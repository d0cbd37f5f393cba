"""Pictures of a model and its images are drawn; what is missing is said, and refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from finetune.inspection.run import draw_pictures
from finetune.inspection.visualized import Visualized
from finetune.settings import PICTURES, VisualizeRun
from tests.contract.tree import ROOT
from tests.support.corpora.shard_folders import image_bytes, make_shard_folder
from tests.support.engine.small_models import export, small_model
from tests.support.engine.subjects import WORLD
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.data.samples import EvaluationSamples
from vitscale.data.settings import DataSettings

SIZE = 16


def drawn(init: Path, output: Path, *images: Path, **values: Any) -> set[str]:
    """Names of the pictures; all of them can be opened."""
    run = VisualizeRun(
        init=str(init), output=str(output), mlflow=False, images=tuple(map(str, images)), **values
    )
    written = draw_pictures(run, WORLD)
    assert set(written) == set(output.iterdir())
    for path in written:
        with Image.open(path) as image:
            image.load()
    return {path.stem for path in written}


def test_what_a_model_lacks_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = export(small_model(num_classes=0), "safetensors", tmp_path / "vit")
    assert drawn(vit, tmp_path / "a") == {"patch_filters", "position_similarity"}
    said = capsys.readouterr().out
    assert "left out attention_distance, attention_rollout: no images" in said
    assert "set images=PATH" in said
    with pytest.raises(UserError, match="pictures: attention_rollout: no images"):
        drawn(vit, tmp_path / "none", pictures=("attention_rollout",))
    # A class name that matplotlib would read as mathematics, and fail.
    make_shard_folder(tmp_path / "shards", lengths={"test": (3,)}, classes=("$a_{", "b"))
    assert drawn(vit, tmp_path / "b", tmp_path / "shards", num_images=2) == set(PICTURES)
    convnext = export(small_model("timm"), "timm", tmp_path / "convnext")
    assert drawn(convnext, tmp_path / "c", tmp_path / "shards") == {"patch_filters"}
    with pytest.raises(UserError, match="pictures: position_similarity: only models of the fam"):
        drawn(convnext, tmp_path / "none", pictures=("position_similarity",))
    assert not (tmp_path / "none").exists()


def test_the_documentation_lists_the_pictures() -> None:
    page = (ROOT / "docs/evaluation.md").read_text().partition("\n## Look inside")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PICTURES)


# ---- images -------------------------------------------------------------------------------------


def visualized(*images: Path, **values: Any) -> Visualized:
    run = VisualizeRun(init="x", images=tuple(map(str, images)), **values)
    return Visualized(run, small_model(), WORLD)


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
    for path, split, message in (
        (tmp_path / "a/000.png", None, "no image can be read"),
        (tmp_path / "no", None, "no such file"),
        (tmp_path, "test", "only shards have splits"),
    ):
        with pytest.raises(UserError, match=message):
            visualized(path, split=split).sheet(3)


def test_shards_give_the_evaluations_pixels_and_classes(tmp_path: Path) -> None:
    """Of a damaged sample it is said where it is."""
    make_shard_folder(tmp_path / "shards", lengths={"test": (4, 3)})
    index = read_split(str(tmp_path / "shards"), split="test")
    with open(index.shards[0], "r+b") as file:
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
    assert f" in {index.shards[0]}: " in skipped
