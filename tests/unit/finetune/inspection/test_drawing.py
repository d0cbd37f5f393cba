"""The pictures of a model are drawn; what it lacks is said, and refused when asked for by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from finetune.inspection.run import draw_pictures
from finetune.settings import PICTURES, VisualizeRun
from tests.contract.tree import ROOT
from tests.support.corpora.small_shards import make_shard_folder
from tests.support.engine.vit_models import CPU, SMALL
from vitscale.config.errors import UserError
from vitscale.models.registry import MODELS

ALWAYS = {"patch_filters", "position_similarity"}
MODEL = {"name": "vit", **SMALL, "image_size": 16, "patch_size": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "shards"
    # A class name that matplotlib would read as mathematics, and fail.
    make_shard_folder(folder, lengths={"test": (3,), "train": (9,)}, classes=("$a_{", "b"))
    return folder


def drawn(init: Path, output: Path, **values: Any) -> set[str]:
    """Names of the pictures; all of them can be opened."""
    run = VisualizeRun.model_validate(
        {"init": str(init), "output": str(output), "mlflow": False, "num_images": 2, **values}
    )
    written = draw_pictures(run, CPU)
    assert set(written) == set(output.iterdir())
    for path in written:
        with Image.open(path) as image:
            image.load()
    return {path.stem for path in written}


def weight_file(path: Path, model: dict[str, Any]) -> Path:
    family = MODELS[model["name"]]
    settings = family.Settings.model_validate(model)
    network = family.load().build_model(settings.resolved(num_classes=0), seed=0)
    save_file(network.state_dict(), path)
    return path


@pytest.fixture
def vit_file(tmp_path: Path) -> Path:
    return weight_file(tmp_path / "vit.safetensors", MODEL)


def test_without_images_the_weights_alone_are_drawn(
    vit_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawn(vit_file, tmp_path / "out", model=MODEL) == ALWAYS
    said = capsys.readouterr().out
    assert "left out attention_distance, attention_rollout: no images" in said
    assert "set images=PATH" in said
    with pytest.raises(UserError, match="pictures: attention_rollout: no images"):
        drawn(vit_file, tmp_path / "none", model=MODEL, pictures=["attention_rollout"])
    assert not (tmp_path / "none").exists()


def test_families_without_attention_say_so(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"name": "timm", "model": "test_convnext", "image_size": 32}
    path = weight_file(tmp_path / "convnext.safetensors", model)
    assert drawn(path, tmp_path / "out", model=model, images=[str(shards)]) == {"patch_filters"}
    said = capsys.readouterr().out
    assert "left out attention_distance, attention_rollout: only models of the family vit" in said
    with pytest.raises(UserError, match="pictures: position_similarity: only models"):
        drawn(path, tmp_path / "none", model=model, pictures=["position_similarity"])


def test_the_documentation_lists_the_pictures() -> None:
    page = (ROOT / "docs/evaluation.md").read_text().partition("\n## Look inside")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PICTURES)


def test_unreadable_images_are_counted_and_wrong_paths_refused(
    vit_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.effect_noise((20, 20), 60).convert("RGB").save(images / "good.png")
    (images / "bad.png").write_bytes(b"no image")
    options: dict[str, Any] = {"model": MODEL, "pictures": ["attention_rollout"]}
    drawn(vit_file, tmp_path / "out", images=[str(images)], **options)
    said = capsys.readouterr().out
    assert f"skipped 1 unreadable images; the first: {images / 'bad.png'}" in said
    for images_path, split, message in (
        (tmp_path / "no", None, "no such file"),
        (images, "test", "only shards have splits"),
    ):
        with pytest.raises(UserError, match=message):
            drawn(vit_file, tmp_path / "x", images=[str(images_path)], split=split, **options)
