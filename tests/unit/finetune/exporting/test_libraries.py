"""transformers and onnxruntime give the logits of exported models, of every kind they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.exporting.folder import write_folder
from finetune.settings import ExportRun
from tests.support.engine.numpy_vit import vit_logits
from tests.support.engine.small_models import small_model
from vitscale.evaluation.trained_model import TrainedModel, open_model

pytestmark = pytest.mark.slow

WIDE = {"mlp_width": 48}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("ViTForImageClassification", {}),
    "no_class_position": ("ViTForImageClassification", {"class_position": False}),
    "distilled": ("DeiTForImageClassificationWithTeacher", {"distillation_token": True}),
    "dinov2": (
        "Dinov2ForImageClassification",
        {"pool": "cls_mean", "layer_scale": 0.1, "gelu": "erf", **WIDE},
    ),
    "swiglu": (
        "Dinov2ForImageClassification",
        {"pool": "cls_mean", "layer_scale": 0.1, "mlp": "swiglu", "mlp_width": 64},
    ),
    "registers": (
        "Dinov2WithRegistersForImageClassification",
        {"num_registers": 3, "pool": "cls_mean", "layer_scale": 0.1, **WIDE},
    ),
}


def images(loaded: TrainedModel) -> torch.Tensor:
    size = loaded.arch.image_size
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


def reference(loaded: TrainedModel) -> np.ndarray:
    settings: Any = loaded.settings
    return vit_logits(
        {name: value.numpy() for name, value in loaded.network.state_dict().items()},
        images(loaded).numpy(),
        num_heads=settings.num_heads,
        gelu=settings.gelu,
        pool=settings.pool,
        eps=settings.layer_norm_eps,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_equal_logits(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForImageClassification

    name, settings = KINDS[kind]
    loaded = small_model(**settings, layer_norm_eps=1e-5)
    list(write_folder(ExportRun(init="x", to="huggingface", output=str(tmp_path / "out")), loaded))
    model: Any
    model, info = AutoModelForImageClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(model).__name__ == name
    assert not any(info.values()), info
    with torch.no_grad():
        found = model.eval()(pixel_values=images(loaded)).logits.numpy()
    assert np.abs(found - reference(loaded)).max() < 1e-4
    again = open_model(**ExportRun(init=str(tmp_path / "out"), to="npz", output="x").source())
    with torch.no_grad():
        read = again.network(images(loaded)).numpy()
    assert np.abs(read - reference(loaded)).max() < 1e-4


def test_onnxruntime_gives_the_logits_of_a_model_of_timm(tmp_path: Path) -> None:
    import onnxruntime

    loaded = small_model("timm")
    list(write_folder(ExportRun(init="x", to="onnx", output=str(tmp_path / "out")), loaded))
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    size = loaded.arch.image_size
    for batch in (1, 2, 5):
        pixels = torch.randn(batch, 3, size, size)
        (found,) = session.run(None, {"images": pixels.numpy()})
        with torch.no_grad():
            own = loaded.network(pixels).numpy()
        assert np.abs(found - own).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ViTModel", {}),
        ("DeiTModel", {"distillation_token": True}),
        ("Dinov2Model", {"layer_scale": 0.1, "mlp": "swiglu", "mlp_width": 64, "pool": "cls_mean"}),
        ("Dinov2WithRegistersModel", {"num_registers": 2, "layer_scale": 0.1, "mlp_width": 48}),
    ],
)
def test_a_model_without_a_head(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    import transformers

    loaded = small_model(num_classes=0, **settings)
    folder = tmp_path / "out"
    lines = list(write_folder(ExportRun(init="x", to="huggingface", output=str(folder)), loaded))
    assert any(line.startswith("checked: the same features in transformers") for line in lines)
    has_pooler = name in ("ViTModel", "DeiTModel")
    options = {"add_pooling_layer": False} if has_pooler else {}
    model: Any = getattr(transformers, name).from_pretrained(folder, **options).eval()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        network: Any = loaded.network
        tokens = network.forward_features(pixels)
        found = model(pixel_values=pixels).last_hidden_state
    assert found.shape[1] >= 17 and (found - tokens).abs().max() < 1e-4
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-feature-extra")
    assert f"{name}.from_pretrained" in card and "The model has no head." in card
    assert ("add_pooling_layer=False" in card) == has_pooler


def test_a_graph_says_what_it_gives_and_needs(tmp_path: Path) -> None:
    import onnxruntime

    for classes in ((), ("a", "é: 'b'", "c", "d", "e")):
        loaded = small_model(num_classes=len(classes), classes=classes or None)
        folder = tmp_path / str(len(classes))
        list(write_folder(ExportRun(init="x", to="onnx", output=str(folder)), loaded))
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        known = session.get_modelmeta().custom_metadata_map
        (output,) = session.get_outputs()
        assert output.name == ("logits" if classes else "features")
        assert json.loads(known["preprocessing"])["image_size"] == 16
        assert tuple(json.loads(known.get("classes", "[]"))) == classes
