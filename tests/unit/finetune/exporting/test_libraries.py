"""transformers and onnxruntime give the logits of exported models, of every kind they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.small_models import export, images_of, off_by, small_model
from vitscale.evaluation.trained_model import open_model

pytestmark = pytest.mark.slow

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("ViT", {}),
    "no_class_position": ("ViT", {"class_position": False}),
    "distilled": ("DeiT", {"distillation_token": True}),
    "dinov2": ("Dinov2", {"pool": "cls_mean", "layer_scale": 0.1, "gelu": "erf", "mlp_width": 48}),
    "swiglu": (
        "Dinov2",
        {"pool": "cls_mean", "layer_scale": 0.1, "mlp": "swiglu", "mlp_width": 64},
    ),
    "registers": (
        "Dinov2WithRegisters",
        {"num_registers": 3, "pool": "cls_mean", "layer_scale": 0.1, "mlp_width": 48},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_equal_logits(tmp_path: Path, kind: str) -> None:
    """The export itself compares them, of features too."""
    from transformers import AutoModelForImageClassification

    name, settings = KINDS[kind]
    loaded = small_model(**settings, layer_norm_eps=1e-5)
    folder = export(loaded, "huggingface", tmp_path / "out")
    model: Any
    model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__.startswith(f"{name}ForImageClassification")
    assert not any(info.values()), info
    assert off_by(lambda images: model.eval()(pixel_values=images).logits, loaded) < 1e-4
    assert off_by(open_model(str(folder)).network, loaded) < 1e-4
    headless = export(small_model(num_classes=0, **settings), "huggingface", tmp_path / "trunk")
    card = (headless / "README.md").read_text()
    assert "checked: the same features in transformers" in card
    assert "pipeline_tag: image-feature-extra" in card and "The model has no head." in card
    assert f"{name}Model.from_pretrained" in card
    assert ("add_pooling_layer=False" in card) == (name in ("ViT", "DeiT"))


def test_onnxruntime_gives_the_logits_of_a_model_of_timm(tmp_path: Path) -> None:
    import onnxruntime

    loaded = small_model("timm")
    session = onnxruntime.InferenceSession(export(loaded, "onnx", tmp_path / "o") / "model.onnx")
    for batch in (1, 2, 5):
        pixels = images_of(loaded, batch)
        (found,) = session.run(None, {"images": pixels.numpy()})
        with torch.no_grad():
            assert (loaded.network(pixels) - torch.from_numpy(found)).abs().max() < 1e-4


@pytest.mark.parametrize("classes", [(), ("a", "é: 'b'", "c", "d", "e")])
def test_a_graph_says_what_it_gives_and_needs(tmp_path: Path, classes: tuple[str, ...]) -> None:
    import onnxruntime

    loaded = small_model(num_classes=len(classes), classes=classes or None)
    session = onnxruntime.InferenceSession(export(loaded, "onnx", tmp_path / "o") / "model.onnx")
    known = session.get_modelmeta().custom_metadata_map
    (output,) = session.get_outputs()
    assert output.name == ("logits" if classes else "features")
    assert json.loads(known["preprocessing"])["image_size"] == 16
    assert tuple(json.loads(known.get("classes", "[]"))) == classes
